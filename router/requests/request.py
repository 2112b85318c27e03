"""`RoutedRequest`: a request ready for the tiers, and how it is made from a client's."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from baton.common.request.generation import GenerationRequest, TextOrTokens
from baton.common.request.request_spec import (
    ReasoningMarks,
    RequestSpec,
    unique_request_id,
)
from baton.common.request.sampling_params import SamplingParams
from kvstore.block_key import BlockKeyChain
from router.fleet.served_model import RequestLimits, ServedModel
from router.observe.request_record import RequestRecord
from router.requests.reasoning import marks_for
from router.requests.tokenizer import MAX_INLINE_LENGTH, Tokenizer
from router.requests.validation import (
    MAX_TOKENIZE_CHARS,
    check_candidates,
    check_length,
    check_logprobs,
    check_prediction,
    check_prompt_characters,
    check_prompt_length,
    check_token_ids,
    check_vocabulary,
    fitting_params,
    returnable_params,
)

__all__ = ["RoutedRequest", "prepare_request", "tokenize_prompt", "truncate_prompt"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """A request, and the facts about its prompt that replicas are chosen by.

    Attributes:
        spec: the request; its deadline is set and `max_tokens` fits the replicas.
        namespace: digest that `block_keys` start from.
        block_keys: keys of the prompt's full blocks.
        block_size: tokens per block key.
        record: the request's times, which grow with its attempts.
    """

    spec: RequestSpec
    namespace: bytes
    block_keys: Sequence[bytes]
    block_size: int
    record: RequestRecord = field(default_factory=RequestRecord)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks of `block_size` tokens that hold the prompt, the partial one included."""
        return -(-self.num_prompt_tokens // self.block_size)

    def num_reused_tokens(self, overlap_blocks: int) -> int:
        """Tokens of the prompt that a replica need not compute.

        Args:
            overlap_blocks: leading blocks of the prompt that the replica probably caches.
        """
        computes_all = self.spec.params.prompt_logprobs is not None
        return 0 if computes_all else overlap_blocks * self.block_size


async def prepare_request(
    request: GenerationRequest,
    prompt: TextOrTokens,
    params: SamplingParams,
    tokenizer: Tokenizer,
    model: ServedModel,
    limits: RequestLimits,
    deadline: float,
    record: RequestRecord,
    marks: ReasoningMarks | None = None,
) -> RoutedRequest:
    """Tokenizes the prompt, applies the limits and computes the block keys.

    Args:
        request: the client's, which `validate_request` has accepted.
        prompt: one of its prompts.
        params: its parameters.
        tokenizer: the model's.
        model: the served model.
        limits: the decode replicas' limits.
        deadline: `time.monotonic()` at which the request must have ended.
        record: the request's times, with the client's name for the request.
        marks: those of the model's reasoning part, if they are configured.

    Raises:
        InvalidArgumentError: the prompt or a parameter does not fit the model.
        FailedPreconditionError: the request limits the reasoning part, which has no tags.
    """
    reasoning = marks_for(params, marks, limits.vocab_size)
    if reasoning is not None:
        reasoning = replace(reasoning, start=request.reasoning_start)
    token_ids = await tokenize_prompt(
        prompt,
        tokenizer,
        limits,
        params.truncate_prompt_tokens,
        add_special_tokens=request.add_special_tokens,
    )
    check = partial(check_token_ids, "prompt token_ids", token_ids, limits.vocab_size)
    await _in_thread_if_long(token_ids, check)
    num_prompts = len(request.prompts)
    is_stated = "max_tokens" in request.stated
    params = _checked(params, len(token_ids), limits, num_prompts, is_stated)
    bad_words = await tokenizer.encode_bad_words_async(params.bad_words)
    for bad_word in bad_words:
        check_token_ids("bad_words", bad_word, limits.vocab_size)
    prediction = await _tokenize_prediction(params.prediction, tokenizer, limits, num_prompts)
    spec = RequestSpec.with_defaults(
        unique_request_id(record.request_id),
        token_ids,
        params,
        eos_token_ids=model.eos_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline=deadline,
        bad_words_token_ids=bad_words,
        reasoning=reasoning,
        prediction_token_ids=prediction,
    )
    return RoutedRequest(
        spec=spec,
        namespace=model.namespace,
        block_keys=await _block_keys(spec, model),
        block_size=model.block_size,
        record=record,
    )


def _checked(
    params: SamplingParams,
    num_prompt_tokens: int,
    limits: RequestLimits,
    num_prompts: int,
    is_stated: bool,
) -> SamplingParams:
    """Returns the parameters that fit the model and the response; refuses others. `is_stated` says
    whether the client states `max_tokens`.
    """
    check_vocabulary(params, limits.vocab_size)
    params = returnable_params(params, num_prompt_tokens, num_prompts, is_stated=is_stated)
    params = fitting_params(params, num_prompt_tokens, limits)
    check_candidates(params, limits)
    check_logprobs(params, num_prompt_tokens, num_prompts)
    return params


async def tokenize_prompt(
    prompt: TextOrTokens,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    truncate_prompt_tokens: int | None = None,
    *,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """The prompt's token ids. A prompt that cannot fit is refused before it is tokenized or copied.

    A text that is to be truncated may have `MAX_TOKENIZE_CHARS` characters, although its tokens
    may not fit: its last tokens are known only when the whole text is tokenized.

    Raises:
        InvalidArgumentError: the prompt is too long.
    """
    if isinstance(prompt, str):
        most_chars = limits.max_total_tokens * tokenizer.longest_token_chars
        if truncate_prompt_tokens is not None:
            most_chars = max(most_chars, MAX_TOKENIZE_CHARS)
        check_prompt_characters(
            "text", prompt, most_chars, tokenizer.longest_token_chars, limits.max_total_tokens
        )
        token_ids: Sequence[int] = await tokenizer.encode_async(
            prompt, add_special_tokens=add_special_tokens
        )
    else:
        token_ids = prompt
    if truncate_prompt_tokens is not None:
        added_by = tokenizer if isinstance(prompt, str) and add_special_tokens else None
        token_ids = truncate_prompt(token_ids, truncate_prompt_tokens, limits, added_by)
    check_prompt_length(len(token_ids), limits)
    return await _in_thread_if_long(token_ids, partial(_copied, token_ids))


async def _in_thread_if_long(token_ids: Sequence[int], function: Callable[[], _Result]) -> _Result:
    """Calls a function of a prompt's tokens; a thread does if they would delay other requests."""
    if len(token_ids) <= MAX_INLINE_LENGTH:
        return function()
    return await asyncio.to_thread(function)


def _copied(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Copies token ids in pieces, between which other threads run."""
    copied: list[int] = []
    for start in range(0, len(token_ids), MAX_INLINE_LENGTH):
        copied += token_ids[start : start + MAX_INLINE_LENGTH]
    return tuple(copied)


async def _tokenize_prediction(
    text: str, tokenizer: Tokenizer, limits: RequestLimits, num_prompts: int
) -> tuple[int, ...]:
    """The token ids of `SamplingParams.prediction`, encoded for each prompt of a message."""
    if not text:
        return ()
    most_chars = limits.max_model_len * tokenizer.longest_token_chars // num_prompts
    check_length("prediction", text, most_chars)
    token_ids = await tokenizer.encode_async(text, add_special_tokens=False, field="prediction")
    check_prediction(token_ids, limits, num_prompts)
    return tuple(token_ids)


def truncate_prompt(
    token_ids: Sequence[int],
    truncate_prompt_tokens: int,
    limits: RequestLimits,
    tokenizer: Tokenizer | None,
) -> Sequence[int]:
    """Returns the last tokens of a prompt, after its leading special tokens, as vLLM does.

    Args:
        token_ids: the prompt.
        truncate_prompt_tokens: how many tokens to keep, the leading ones included; -1 keeps as
            many as leave room for one generated token.
        limits: the engine's.
        tokenizer: encoded the prompt; the special tokens that it added at the start are kept.
            None for a prompt that the caller gave as token ids.
    """
    most = limits.max_total_tokens - 1 if truncate_prompt_tokens < 0 else truncate_prompt_tokens
    if len(token_ids) <= most:
        return token_ids
    num_leading = 0 if tokenizer is None else min(tokenizer.num_leading_special_tokens, most)
    return [*token_ids[:num_leading], *token_ids[len(token_ids) - most + num_leading :]]


async def _block_keys(spec: RequestSpec, model: ServedModel) -> tuple[bytes, ...]:
    """The keys of the prompt's full blocks; those of a long prompt are computed in a thread."""
    chain = BlockKeyChain(model.namespace, model.block_size, cache_salt=spec.cache_salt)
    token_ids = spec.prompt_token_ids
    return tuple(await _in_thread_if_long(token_ids, partial(chain.extend, token_ids)))
