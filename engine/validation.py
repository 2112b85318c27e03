"""Checks of requests before an engine queues them, and of flags for a model with states."""

import math
from collections.abc import Sequence

from baton.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    Reason,
    ResourceExhaustedError,
)
from baton.common.request.request_spec import RequestSpec
from engine.config import EngineConfig
from engine.kv_cache.spec import spec_of
from engine.request import EngineRequest
from engine.runner import ModelInfo
from kvstore.block_key import BlockKeyChain
from kvstore.handoff import KvHandoff, connector_name

__all__ = ["check_request", "num_blocks_needed"]

_MAX_LOGPROB_VALUES = 2**20
"""Log-probabilities in one message, of about 8 bytes each, where a token's own counts as two;
keeps it well below rpc.channels.MAX_MESSAGE_BYTES."""

_PRIORITY_BOUND = 2**31
"""As in the messages."""

# They bound the memory of `kernels.RuleTable`, which is as wide as the widest request needs.
_MAX_BAD_WORDS = 512  # `SamplingParams.bad_words` allows 256 texts, of up to two words each
_MAX_BAD_WORD_TOKENS = 64


def check_request(
    request: EngineRequest,
    *,
    config: EngineConfig,
    info: ModelInfo,
    num_blocks: int,
    num_slots: int = 0,
    namespace: bytes,
) -> None:
    """Refuses a request that the engine could never finish.

    Raises:
        InvalidArgumentError: names the field, its value and the limit.
        FailedPreconditionError: the handoff is not for this engine or prompt.
        ResourceExhaustedError: the request needs more blocks or slots than the pool has.
    """
    spec = request.spec
    _check_priority(spec)
    _check_candidates(request, config)
    _check_progress(request)
    _check_tokens(request, info)
    _check_rules(spec, info)
    _check_prediction(spec, info)
    _check_salt(spec)
    _check_logprobs(spec, info)
    _check_blocks(request, config, info, num_blocks)
    if info.states is not None:
        _check_slots(request, num_slots)
    if request.handoff is not None:
        connector = connector_name(config.kv_connector)
        request.handoff.check_compatible(namespace=namespace, connector=connector)
        has_states = info.states is not None
        _check_handoff(request, request.handoff, config.transfer_block_size, has_states)
    if request.prefix is not None:
        connector = connector_name(config.kv_connector)
        request.prefix.check_compatible(namespace=namespace, connector=connector)
        _check_prefix(request.spec, request.prefix, config.transfer_block_size)


def num_blocks_needed(request: EngineRequest, config: EngineConfig, info: ModelInfo) -> int:
    """The most KV blocks that the request holds at once on this engine."""
    spec, cache = request.spec, spec_of(config, info)
    num_prompt = len(spec.prompt_token_ids)
    if request.hands_over:
        return cache.blocks_for(num_prompt)
    num_tokens = _max_kv_tokens(spec, info)
    return cache.blocks_for_branches(num_prompt, num_tokens, spec.params.num_candidates)


def _max_kv_tokens(spec: RequestSpec, info: ModelInfo) -> int:
    """The most tokens of one candidate that have KV: the token drawn last is never an input."""
    return min(spec.max_total_tokens, info.max_model_len) - 1


def _check_priority(spec: RequestSpec) -> None:
    if type(spec.priority) is not int or not -_PRIORITY_BOUND <= spec.priority < _PRIORITY_BOUND:
        limit = f"an integer in [-{_PRIORITY_BOUND}, {_PRIORITY_BOUND})"
        raise InvalidArgumentError.for_field("priority", spec.priority, limit)


def _check_candidates(request: EngineRequest, config: EngineConfig) -> None:
    # All first tokens are drawn from the one sequence that has the prompt.
    num_candidates = request.spec.params.num_candidates
    if not request.hands_over and num_candidates > config.max_running:
        limit = f"at most {config.max_running}, the sequences that this engine runs at once"
        raise InvalidArgumentError.for_field("number of candidates", num_candidates, limit)


def _check_progress(request: EngineRequest) -> None:
    """Refuses tokens of another replica that cannot belong to this request."""
    params = request.spec.params
    if request.first_beams and params.beam_width is None:
        raise InvalidArgumentError("first_beams is set without beam_search")
    if request.progress and params.beam_width is not None:
        raise InvalidArgumentError("candidates is set together with beam_search; set first_beams")
    seen: set[int] = set()
    for given in request.progress:
        if not 0 <= given.index < params.num_candidates or given.index in seen:
            limit = f"below {params.num_candidates} and unique"
            raise InvalidArgumentError.for_field("candidates.index", given.index, limit)
        if not given.output_token_ids:
            raise InvalidArgumentError("candidates.output_token_ids is empty; it must have a token")
        returns_later = params.is_ranked and params.logprobs is not None
        num_details = len(given.output_token_ids) if returns_later else 0
        if len(given.token_logprobs) != num_details:
            number = len(given.token_logprobs)
            raise InvalidArgumentError(
                f"candidates.token_logprobs has {number} entries; it must have {num_details}"
            )
        seen.add(given.index)
    if len({token_id for token_id, _ in request.first_beams}) < len(request.first_beams):
        raise InvalidArgumentError("first_beams has a token twice")
    logprobs = [given.logprob for given in request.progress]
    logprobs += [logprob for _, logprob in request.first_beams]
    if any(math.isnan(logprob) for logprob in logprobs):
        raise InvalidArgumentError.for_field("logprob", math.nan, "a number")


def _check_tokens(request: EngineRequest, info: ModelInfo) -> None:
    spec = request.spec
    if not spec.prompt_token_ids:
        raise InvalidArgumentError("prompt is empty; it must have at least one token")
    _check_vocabulary("prompt token_ids", spec.prompt_token_ids, info)
    for given in request.progress:
        _check_vocabulary("output_token_ids", given.output_token_ids, info)
    if request.first_beams:
        _check_vocabulary("first_beams", [token_id for token_id, _ in request.first_beams], info)
    num_generated = max((len(given.output_token_ids) for given in request.progress), default=0)
    num_generated = max(num_generated, 1 if request.first_beams else 0)
    if spec.params.max_tokens <= num_generated:
        limit = f"above the {num_generated} tokens generated already"
        raise InvalidArgumentError.for_field("max_tokens", spec.params.max_tokens, limit)
    num_tokens = len(spec.prompt_token_ids) + num_generated
    if num_tokens >= info.max_model_len:
        limit = f"below the model's {info.max_model_len}, to leave room for a token"
        raise InvalidArgumentError.for_field("number of prompt tokens", num_tokens, limit)


def _check_rules(spec: RequestSpec, info: ModelInfo) -> None:
    """Refuses rules that name unknown tokens, or that leave no token for the first draw."""
    params, marks = spec.params, spec.reasoning
    _check_bad_words(spec.bad_words_token_ids)
    named = {
        "stop_token_ids": spec.stop_token_ids if params.min_tokens else params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": params.logit_bias,
        "bad_words_token_ids": [token for word in spec.bad_words_token_ids for token in word],
        "reasoning": marks and (*marks.start_token_ids, *marks.end_token_ids),
    }
    for field, token_ids in named.items():
        if token_ids:
            _check_vocabulary(field, tuple(token_ids), info)
    banned = {word[0] for word in spec.bad_words_token_ids if len(word) == 1}
    if params.min_tokens:
        banned |= spec.stop_token_ids
    allowed = params.allowed_token_ids
    if banned.issuperset(allowed) if allowed else len(banned) == info.vocab_size:
        raise InvalidArgumentError(
            "allowed_token_ids, bad_words, and stop_token_ids while min_tokens is not reached, "
            "leave no token to draw; at least one must be left"
        )


def _check_bad_words(words: Sequence[Sequence[int]]) -> None:
    field = "bad_words_token_ids"
    if not all(words):
        raise InvalidArgumentError(f"{field} has an empty word; each must have a token")
    if len(words) > _MAX_BAD_WORDS:
        raise InvalidArgumentError(
            f"{field} has {len(words)} words; it may have at most {_MAX_BAD_WORDS}"
        )
    longest = max(map(len, words), default=0)
    if longest > _MAX_BAD_WORD_TOKENS:
        raise InvalidArgumentError(
            f"{field} has a word of {longest} tokens; each may have at most {_MAX_BAD_WORD_TOKENS}"
        )


def _check_prediction(spec: RequestSpec, info: ModelInfo) -> None:
    field, token_ids = "prediction_token_ids", spec.prediction_token_ids
    if len(token_ids) > info.max_model_len:
        raise InvalidArgumentError(
            f"{field} has {len(token_ids)} tokens; it must have at most {info.max_model_len}"
        )
    if token_ids:
        _check_vocabulary(field, token_ids, info)


def _check_vocabulary(field: str, token_ids: Sequence[int], info: ModelInfo) -> None:
    if not 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
        worst = max(token_ids) if max(token_ids) >= info.vocab_size else min(token_ids)
        limit = f"in [0, {info.vocab_size}), the model's vocabulary"
        raise InvalidArgumentError.for_field(field, worst, limit)


def _check_salt(spec: RequestSpec) -> None:
    try:
        spec.cache_salt.encode()
    except UnicodeEncodeError:
        limit = "text that UTF-8 can encode"
        raise InvalidArgumentError.for_field("cache_salt", spec.cache_salt, limit) from None


def _check_logprobs(spec: RequestSpec, info: ModelInfo) -> None:
    """Refuses log-probabilities that one message cannot hold: a prompt's, and those of ranked
    candidates, which are returned at once.
    """
    params, num_prompt = spec.params, len(spec.prompt_token_ids)
    if params.prompt_logprobs is not None:
        most = _MAX_LOGPROB_VALUES // (params.prompt_logprobs + 2)
        _check_number("prompt_logprobs", params.prompt_logprobs, "prompt tokens", num_prompt, most)
    if params.logprobs is not None and params.is_ranked:
        most = _MAX_LOGPROB_VALUES // (params.logprobs + 2)
        num_generated = min(spec.max_total_tokens, info.max_model_len) - num_prompt
        num_tokens = params.n * num_generated
        _check_number("logprobs", params.logprobs, "tokens in all candidates", num_tokens, most)


def _check_number(field: str, value: int, what: str, number: int, most: int) -> None:
    if number > most:
        raise InvalidArgumentError(
            f"{field} is {value}, which allows at most {most} {what}; the request has {number}"
        )


def _check_blocks(
    request: EngineRequest, config: EngineConfig, info: ModelInfo, num_blocks: int
) -> None:
    needed = num_blocks_needed(request, config, info)
    if needed > num_blocks:
        raise ResourceExhaustedError(
            f"the request needs {needed} KV blocks of {config.block_size} tokens for "
            f"{_tokens_in_words(request, info)}; the pool has {num_blocks}",
            reason=Reason.NO_REPLICA_FITS,
        )


def _check_slots(request: EngineRequest, num_slots: int) -> None:
    needed = 1 if request.hands_over else request.spec.params.num_candidates
    if needed > num_slots:
        raise ResourceExhaustedError(
            f"the request needs {needed} slots for states, one per candidate; the pool has "
            f"{num_slots} (--num-state-slots)",
            reason=Reason.NO_REPLICA_FITS,
        )


def _tokens_in_words(request: EngineRequest, info: ModelInfo) -> str:
    spec = request.spec
    if request.hands_over:
        return f"{len(spec.prompt_token_ids)} tokens"
    num_candidates = spec.params.num_candidates
    each = f" in each of {num_candidates} candidates" if num_candidates > 1 else ""
    return f"{_max_kv_tokens(spec, info)} tokens{each}"


def _check_handoff(
    request: EngineRequest, handoff: KvHandoff, block_size: int, has_states: bool
) -> None:
    if not request.has_begun:
        raise InvalidArgumentError(
            "candidates and first_beams are empty; a handoff needs first tokens"
        )
    prompt = request.spec.prompt_token_ids
    if handoff.num_tokens > len(prompt) and len(request.progress) == 1:
        # Of a request that was moved. The last token has no KV: it was drawn, not computed.
        prompt += request.progress[0].output_token_ids[:-1]
    num_full = len(prompt) // block_size * block_size
    # A request that was moved is handed over as far as its engine had kept states.
    is_kept = has_states and handoff.num_tokens in range(block_size, num_full, block_size)
    if not is_kept and handoff.num_tokens not in (len(prompt), num_full or len(prompt)):
        limit = f"the prompt's {len(prompt)}, or the {num_full} in its full blocks"
        raise InvalidArgumentError.for_field("handoff.num_tokens", handoff.num_tokens, limit)
    keys = BlockKeyChain(handoff.namespace, block_size, cache_salt=request.spec.cache_salt)
    handed_over = prompt[: handoff.num_tokens]
    if handoff.block_keys != keys.of_prompt(handed_over, handoff.handoff_id):
        # Equal keys mean equal bytes; other keys would name another prompt's KV.
        raise FailedPreconditionError("handoff.block_keys are not the keys of this prompt")


def _check_prefix(spec: RequestSpec, prefix: KvHandoff, block_size: int) -> None:
    if spec.params.prompt_logprobs is not None:
        raise InvalidArgumentError("prefix is set together with prompt_logprobs; set one of them")
    prompt, num_tokens = spec.prompt_token_ids, prefix.num_tokens
    if num_tokens not in range(block_size, len(prompt), block_size):
        limit = f"a multiple of {block_size} below the prompt's {len(prompt)}"
        raise InvalidArgumentError.for_field("prefix.num_tokens", num_tokens, limit)
    keys = BlockKeyChain(prefix.namespace, block_size, cache_salt=spec.cache_salt)
    if prefix.block_keys != tuple(keys.extend(prompt[:num_tokens])):
        raise FailedPreconditionError("prefix.block_keys are not the keys of this prompt")
