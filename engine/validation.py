"""What an engine refuses before it queues a request. Pure."""

from baton.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from engine.config import EngineConfig
from engine.request import EngineRequest
from engine.runner import ModelInfo
from kvstore.block_key import BlockKeyChain
from kvstore.handoff import KvHandoff, connector_name

__all__ = ["check_request"]


def check_request(
    request: EngineRequest,
    *,
    config: EngineConfig,
    info: ModelInfo,
    num_blocks: int,
    namespace: bytes,
) -> None:
    """Refuses a request that the engine could never finish.

    Raises:
        InvalidArgumentError: names the field, its value and the limit.
        FailedPreconditionError: the handoff is not for this engine or prompt.
        ResourceExhaustedError: it needs more blocks than the pool has.
    """
    _check_tokens(request, info)
    _check_salt(request)
    _check_blocks(request, config, info, num_blocks)
    if request.handoff is not None:
        connector = connector_name(config.kv_connector)
        request.handoff.check_compatible(namespace=namespace, connector=connector)
        _check_handoff(request, request.handoff, config.block_size)


def _check_tokens(request: EngineRequest, info: ModelInfo) -> None:
    if not request.prompt_token_ids:
        raise InvalidArgumentError("prompt is empty; it must have at least one token")
    for field, token_ids in (
        ("prompt token_ids", request.prompt_token_ids),
        ("output_token_ids", request.output_token_ids),
    ):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
            worst = max(token_ids) if max(token_ids) >= info.vocab_size else min(token_ids)
            limit = f"in [0, {info.vocab_size}), the model's vocabulary"
            raise InvalidArgumentError.for_field(field, worst, limit)
    if request.max_tokens <= len(request.output_token_ids):
        limit = f"above the {len(request.output_token_ids)} tokens generated already"
        raise InvalidArgumentError.for_field("max_tokens", request.max_tokens, limit)
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    if num_tokens >= info.max_model_len:
        limit = f"below the model's {info.max_model_len}, to leave room for a token"
        raise InvalidArgumentError.for_field("number of prompt tokens", num_tokens, limit)


def _check_salt(request: EngineRequest) -> None:
    try:
        request.cache_salt.encode()
    except UnicodeEncodeError:
        limit = "text that UTF-8 can encode"
        raise InvalidArgumentError.for_field("cache_salt", request.cache_salt, limit) from None


def _check_blocks(
    request: EngineRequest, config: EngineConfig, info: ModelInfo, num_blocks: int
) -> None:
    num_tokens = len(request.prompt_token_ids)
    if config.role != "prefill":
        # The last token drawn is never fed back, so its KV takes no slot.
        num_tokens = min(num_tokens + request.max_tokens, info.max_model_len) - 1
    needed = -(-num_tokens // config.block_size)
    if needed > num_blocks:
        raise ResourceExhaustedError(
            f"the request needs {needed} KV blocks of {config.block_size} tokens for "
            f"{num_tokens} tokens; the pool has {num_blocks}"
        )


def _check_handoff(request: EngineRequest, handoff: KvHandoff, block_size: int) -> None:
    num_tokens = len(request.prompt_token_ids)
    if handoff.num_tokens != num_tokens:
        raise InvalidArgumentError.for_field(
            "handoff.num_tokens", handoff.num_tokens, f"the prompt's {num_tokens}"
        )
    if not request.output_token_ids:
        raise InvalidArgumentError("output_token_ids is empty; a handoff comes with a first token")
    keys = BlockKeyChain(handoff.namespace, block_size, cache_salt=request.cache_salt)
    if handoff.block_keys != keys.of_prompt(request.prompt_token_ids, handoff.handoff_id):
        # Equal keys mean equal bytes: others would be a foreign prompt's KV.
        raise FailedPreconditionError("handoff.block_keys are not the keys of this prompt")
