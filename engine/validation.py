"""What an engine refuses before it queues a request. Pure."""

import math
from collections.abc import Sequence

from baton.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from engine.config import EngineConfig
from engine.kv_cache.spec import spec_of
from engine.request import EngineRequest
from engine.runner import ModelInfo
from kvstore.block_key import BlockKeyChain
from kvstore.handoff import KvHandoff, connector_name

__all__ = ["check_request", "num_blocks_needed"]


def check_request(
    request: EngineRequest,
    *,
    config: EngineConfig,
    info: ModelInfo,
    num_blocks: int,
    namespace: bytes,
    kv_form: str = "",
) -> None:
    """Refuses a request that the engine could never finish.

    Raises:
        InvalidArgumentError: names the field, its value and the limit.
        FailedPreconditionError: the handoff is not for this engine or prompt.
        ResourceExhaustedError: it needs more blocks than the pool has.
    """
    _check_candidates(request, config)
    _check_progress(request)
    _check_tokens(request, info)
    _check_salt(request)
    _check_blocks(request, config, info, num_blocks)
    if request.handoff is not None:
        connector = connector_name(config.kv_connector)
        request.handoff.check_compatible(namespace=namespace, connector=connector, kv_form=kv_form)
        _check_handoff(request, request.handoff, config.transfer_block_size)


def num_blocks_needed(request: EngineRequest, config: EngineConfig, info: ModelInfo) -> int:
    """The most KV blocks that the request holds at once on this engine."""
    spec = spec_of(config, info.windows)
    num_prompt = len(request.prompt_token_ids)
    if config.role == "prefill":
        return spec.blocks_for(num_prompt)
    return spec.blocks_for_branches(num_prompt, _most_tokens(request, info), request.num_candidates)


def _most_tokens(request: EngineRequest, info: ModelInfo) -> int:
    """Of one candidate. The last token drawn is never fed back, so its KV takes no slot."""
    return min(len(request.prompt_token_ids) + request.max_tokens, info.max_model_len) - 1


def _check_candidates(request: EngineRequest, config: EngineConfig) -> None:
    if not 1 <= request.num_returned <= request.num_candidates:
        limit = f"in [1, {request.num_candidates}], the candidates generated"
        raise InvalidArgumentError.for_field("candidates returned", request.num_returned, limit)
    # A prefill engine draws all first tokens after the one sequence that has the prompt.
    if config.role != "prefill" and request.num_candidates > config.max_running:
        limit = f"at most {config.max_running}, the sequences that run at once here"
        raise InvalidArgumentError.for_field("number of candidates", request.num_candidates, limit)


def _check_progress(request: EngineRequest) -> None:
    """What another replica has generated must be what this request could have got."""
    if request.first_beams and request.beam_search is None:
        raise InvalidArgumentError("first_beams is set without beam_search")
    if request.progress and request.beam_search is not None:
        raise InvalidArgumentError("candidates is set together with beam_search; set first_beams")
    seen: set[int] = set()
    for given in request.progress:
        if not 0 <= given.index < request.num_candidates or given.index in seen:
            limit = f"below {request.num_candidates} and unique"
            raise InvalidArgumentError.for_field("candidates.index", given.index, limit)
        if not given.output_token_ids:
            raise InvalidArgumentError("candidates.output_token_ids is empty; it must have a token")
        seen.add(given.index)
    if len({token_id for token_id, _ in request.first_beams}) < len(request.first_beams):
        raise InvalidArgumentError("first_beams has a token twice")
    logprobs = [given.logprob for given in request.progress]
    logprobs += [logprob for _, logprob in request.first_beams]
    if any(math.isnan(logprob) for logprob in logprobs):
        raise InvalidArgumentError.for_field("logprob", math.nan, "a number")


def _check_tokens(request: EngineRequest, info: ModelInfo) -> None:
    if not request.prompt_token_ids:
        raise InvalidArgumentError("prompt is empty; it must have at least one token")
    _check_vocabulary("prompt token_ids", request.prompt_token_ids, info)
    for given in request.progress:
        _check_vocabulary("output_token_ids", given.output_token_ids, info)
    if request.first_beams:
        _check_vocabulary("first_beams", [token_id for token_id, _ in request.first_beams], info)
    num_generated = max((len(given.output_token_ids) for given in request.progress), default=0)
    num_generated = max(num_generated, 1 if request.first_beams else 0)
    if request.max_tokens <= num_generated:
        limit = f"above the {num_generated} tokens generated already"
        raise InvalidArgumentError.for_field("max_tokens", request.max_tokens, limit)
    num_tokens = len(request.prompt_token_ids) + num_generated
    if num_tokens >= info.max_model_len:
        limit = f"below the model's {info.max_model_len}, to leave room for a token"
        raise InvalidArgumentError.for_field("number of prompt tokens", num_tokens, limit)


def _check_vocabulary(field: str, token_ids: Sequence[int], info: ModelInfo) -> None:
    if not 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
        worst = max(token_ids) if max(token_ids) >= info.vocab_size else min(token_ids)
        limit = f"in [0, {info.vocab_size}), the model's vocabulary"
        raise InvalidArgumentError.for_field(field, worst, limit)


def _check_salt(request: EngineRequest) -> None:
    try:
        request.cache_salt.encode()
    except UnicodeEncodeError:
        limit = "text that UTF-8 can encode"
        raise InvalidArgumentError.for_field("cache_salt", request.cache_salt, limit) from None


def _check_blocks(
    request: EngineRequest, config: EngineConfig, info: ModelInfo, num_blocks: int
) -> None:
    needed = num_blocks_needed(request, config, info)
    if needed > num_blocks:
        raise ResourceExhaustedError(
            f"the request needs {needed} KV blocks of {config.block_size} tokens for "
            f"{_size_of(request, config, info)}; the pool has {num_blocks}"
        )


def _size_of(request: EngineRequest, config: EngineConfig, info: ModelInfo) -> str:
    if config.role == "prefill":
        return f"{len(request.prompt_token_ids)} tokens"
    each = f" in each of {request.num_candidates} candidates" if request.num_candidates > 1 else ""
    return f"{_most_tokens(request, info)} tokens{each}"


def _check_handoff(request: EngineRequest, handoff: KvHandoff, block_size: int) -> None:
    num_tokens = len(request.prompt_token_ids)
    if handoff.num_tokens != num_tokens:
        raise InvalidArgumentError.for_field(
            "handoff.num_tokens", handoff.num_tokens, f"the prompt's {num_tokens}"
        )
    if not request.has_begun:
        raise InvalidArgumentError(
            "candidates and first_beams are empty; a handoff comes with first tokens"
        )
    keys = BlockKeyChain(handoff.namespace, block_size, cache_salt=request.cache_salt)
    if handoff.block_keys != keys.of_prompt(request.prompt_token_ids, handoff.handoff_id):
        # Equal keys mean equal bytes: others would be a foreign prompt's KV.
        raise FailedPreconditionError("handoff.block_keys are not the keys of this prompt")
