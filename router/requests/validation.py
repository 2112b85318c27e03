"""Checks of clients' requests, before they cost anything.

Every refusal is an `InvalidArgumentError` that names the field, its value and
the limit. Bytes that are no message, invalid UTF-8 included, never get here:
`rpc.interceptors` refuses them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.common.errors import InvalidArgumentError, PromptTooLongError
from baton.common.request.default_params import over_defaults
from baton.common.request.generation import GenerationRequest
from baton.common.request.sampling_params import AS_MANY_AS_FIT, SamplingParams
from router.fleet.served_model import RequestLimits

__all__ = [
    "MAX_CACHE_SALT_CHARS",
    "MAX_DETOKENIZE_TOKEN_IDS",
    "MAX_PROMPTS",
    "MAX_REQUEST_ID_CHARS",
    "MAX_RETURNED_LOGPROBS",
    "MAX_RETURNED_TOKENS",
    "MAX_TOKENIZE_CHARS",
    "check_candidates",
    "check_length",
    "check_logprobs",
    "check_prediction",
    "check_prompt_characters",
    "check_prompt_length",
    "check_token_ids",
    "check_vocabulary",
    "fitting_params",
    "returnable_params",
    "validate_request",
]

MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 256
MAX_PROMPTS = 256
"""The most prompts of one message."""
MAX_TOKENIZE_CHARS = 2**20
MAX_DETOKENIZE_TOKEN_IDS = 2**18
MAX_RETURNED_TOKENS = 2**20
"""The most tokens of all candidates together, which must fit in one message
(rpc.channels.MAX_MESSAGE_BYTES).
"""
MAX_RETURNED_LOGPROBS = 2**20
"""The most log-probabilities of all prompts and candidates of a message, where a token's own
counts as two. One takes up to 11 bytes of a message, the token and its text included.
"""


def validate_request(request: GenerationRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Checks everything that needs neither tokenizer nor replicas; returns the parameters.

    Args:
        request: the client's.
        defaults: values of the sampling parameters that the request leaves unset.

    Raises:
        InvalidArgumentError: names the field, its value and the limit.
    """
    check_length("request_id", request.request_id, MAX_REQUEST_ID_CHARS)
    check_length("cache_salt", request.cache_salt, MAX_CACHE_SALT_CHARS)
    for i, prompt in enumerate(request.prompts):
        if not prompt:
            path = f"prompts[{i}]." if request.has_several else ""
            kind = "text" if isinstance(prompt, str) else "token_ids"
            raise InvalidArgumentError(
                f"{path}{kind} is empty; the prompt must have at least 1 token"
            )
    params = over_defaults(request.stated, defaults)
    prompts = (prompt for prompt in request.prompts if isinstance(prompt, str))
    texts = (params.prediction, *params.stop, *params.bad_words, *prompts)
    _check_unicode(request.request_id, request.cache_salt, *texts)
    return params


def _check_unicode(*texts: str) -> None:
    """Refuses lone surrogates, which JSON can state and messages to workers cannot hold."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the request cannot be sent: {error}") from error


def check_length(
    field: str, value: str | Sequence[int], max_length: int, unit: str = "characters"
) -> None:
    """Refuses a value that is too long.

    Raises:
        InvalidArgumentError: names the field, its length and the limit.
    """
    if len(value) > max_length:
        raise InvalidArgumentError(
            f"{field} has {len(value)} {unit}; it must have at most {max_length}"
        )


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Refuses ids outside the vocabulary.

    Raises:
        InvalidArgumentError: names the field and the largest bad id.
    """
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidArgumentError.for_field(
            field, largest, f"below the vocabulary size {vocab_size}"
        )


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuses parameters that name tokens outside the vocabulary.

    Raises:
        InvalidArgumentError: names the field and the largest bad id.
    """
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        check_token_ids(field, getattr(params, field) or (), vocab_size)


def check_prompt_characters(
    field: str, prompt: str, most_chars: int, longest_token_chars: int, max_total_tokens: int
) -> None:
    """Refuses texts that cannot fit before they are tokenized.

    Args:
        field: names the text.
        prompt: the text.
        most_chars: the most characters that it may have.
        longest_token_chars: the most characters of a token.
        max_total_tokens: the most tokens of a prompt and its completion together.

    Raises:
        PromptTooLongError: names the text's length and the limit.
    """
    if len(prompt) > most_chars:
        raise PromptTooLongError(
            f"{field} has {len(prompt)} characters; it must have at most {most_chars}",
            num_tokens=-(-len(prompt) // longest_token_chars),
            max_total_tokens=max_total_tokens,
        )


def check_prompt_length(num_prompt_tokens: int, limits: RequestLimits) -> None:
    """Refuses prompts that leave no room for one generated token.

    Raises:
        InvalidArgumentError: there is none.
        PromptTooLongError: names the prompt's length and the limit.
    """
    if num_prompt_tokens == 0:
        raise InvalidArgumentError("prompt is empty; it must have at least 1 token")
    for limit, what in (
        (limits.max_model_len, "the model's context length"),
        (limits.max_pool_tokens, "the tokens that a replica's KV pool holds"),
    ):
        if num_prompt_tokens >= limit:
            raise PromptTooLongError(
                f"prompt has {num_prompt_tokens} tokens; it must have fewer than {limit}, {what}",
                num_tokens=num_prompt_tokens,
                max_total_tokens=limit,
            )


def check_prediction(token_ids: Sequence[int], limits: RequestLimits, num_prompts: int = 1) -> None:
    """Refuses predictions that the prompts of a message have no room for.

    Args:
        token_ids: those of `SamplingParams.prediction`.
        limits: the engine's.
        num_prompts: prompts of the message; each gets a copy.

    Raises:
        InvalidArgumentError: names the field and the limit.
    """
    check_length("prediction", token_ids, limits.max_model_len // num_prompts, "tokens")
    check_token_ids("prediction", token_ids, limits.vocab_size)


def fitting_params(
    params: SamplingParams, num_prompt_tokens: int, limits: RequestLimits
) -> SamplingParams:
    """Returns the parameters with `max_tokens`, and `min_tokens` if need be, reduced to what
    fits after the prompt, which leaves room for a token. The candidate ends as LENGTH either way.
    """
    room = limits.max_total_tokens - num_prompt_tokens
    if params.max_tokens <= room:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def returnable_params(
    params: SamplingParams, num_prompt_tokens: int, num_prompts: int = 1, *, is_stated: bool = True
) -> SamplingParams:
    """Returns the parameters, whose `max_tokens` is at most what one response can hold, if it asks
    for as many tokens as fit or is a default. A smaller number that is stated is checked instead.

    Args:
        params: the client's.
        num_prompt_tokens: tokens of the prompt.
        num_prompts: prompts of the message, which share its log-probabilities equally.
        is_stated: whether the client states `max_tokens`.
    """
    if is_stated and params.max_tokens != AS_MANY_AS_FIT:
        return params
    most = MAX_RETURNED_TOKENS if params.n > 1 else AS_MANY_AS_FIT
    if params.logprobs is not None:
        most = min(most, _most_tokens_with_logprobs(params, num_prompt_tokens, num_prompts))
    # With 0, `check_logprobs` refuses the request.
    most = min(most // params.n or 1, params.max_tokens)
    return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))


def check_candidates(params: SamplingParams, limits: RequestLimits) -> None:
    """Refuses more candidates than a replica runs at once, or than one message can hold.

    Raises:
        InvalidArgumentError: names the field that sets their number and the limit.
    """
    if params.num_candidates > limits.max_candidates:
        field = next(name for name in ("beam_width", "best_of", "n") if getattr(params, name))
        raise InvalidArgumentError.for_field(
            field,
            params.num_candidates,
            f"at most {limits.max_candidates}, the sequences that a replica runs at once",
        )
    if params.n > 1 and params.n * params.max_tokens > MAX_RETURNED_TOKENS:
        raise InvalidArgumentError.for_field(
            "max_tokens",
            params.max_tokens,
            f"at most {MAX_RETURNED_TOKENS // params.n} for each of {params.n} candidates",
        )


def check_logprobs(params: SamplingParams, num_prompt_tokens: int, num_prompts: int = 1) -> None:
    """Refuses more log-probabilities than the response of `Generate` can hold.

    Args:
        params: the parameters; `max_tokens` fits the model.
        num_prompt_tokens: tokens of the prompt.
        num_prompts: prompts of the message, which share its log-probabilities equally.

    Raises:
        InvalidArgumentError: names the field, and the tokens that its value allows.
    """
    each = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
    prompt_logprobs = params.prompt_logprobs
    if prompt_logprobs is not None:
        most = MAX_RETURNED_LOGPROBS // num_prompts // (prompt_logprobs + 2)
        if num_prompt_tokens > most:
            raise InvalidArgumentError(
                f"prompt_logprobs is {prompt_logprobs}, which allows at most {most} tokens of the "
                f"prompt{each}; it has {num_prompt_tokens}"
            )
    if params.logprobs is None:
        return
    most = _most_tokens_with_logprobs(params, num_prompt_tokens, num_prompts)
    if params.n * params.max_tokens > most:
        beside = "" if prompt_logprobs is None else f" beside prompt_logprobs {prompt_logprobs}"
        raise InvalidArgumentError(
            f"logprobs is {params.logprobs}, which allows at most {most} tokens in all returned "
            f"candidates{beside}{each}; n * max_tokens is {params.n * params.max_tokens}"
        )


def _most_tokens_with_logprobs(
    params: SamplingParams, num_prompt_tokens: int, num_prompts: int
) -> int:
    """The most tokens of all candidates, for a request that sets `logprobs`."""
    num_of_prompt = 0
    if params.prompt_logprobs is not None:
        num_of_prompt = num_prompt_tokens * (params.prompt_logprobs + 2)
    share = MAX_RETURNED_LOGPROBS // num_prompts
    return max(share - num_of_prompt, 0) // ((params.logprobs or 0) + 2)
