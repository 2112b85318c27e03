"""Step 1 of a request's life: text to token ids, limits, block keys, a seed."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from baton.sampling_params import SamplingParams
from kvstore.block_key import BlockKeyChain
from router.request import GenerationRequest, RequestLimits, RoutedRequest
from router.served_model import ServedModel
from router.tokenizer import Tokenizer
from router.validation import (
    check_candidates,
    check_length,
    check_prompt_length,
    check_token_ids,
    fitting_max_tokens,
)

__all__ = ["decode", "encode", "prepare_request"]

_LONGEST_INLINE_PROMPT = 4096
"""Characters or token ids; more are worked on in a thread, as the event loop would notice."""


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text; a long one is encoded off the event loop."""
    if len(text) <= _LONGEST_INLINE_PROMPT:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


async def decode(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """The text of token ids; that of many is decoded off the event loop."""
    if len(token_ids) <= _LONGEST_INLINE_PROMPT:
        return tokenizer.decode(list(token_ids), skip_special_tokens)
    return await asyncio.to_thread(tokenizer.decode, list(token_ids), skip_special_tokens)


async def prepare_request(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    model: ServedModel,
    limits: RequestLimits,
    deadline: float,
) -> RoutedRequest:
    """Makes a request ready for the tiers.

    Raises:
        InvalidArgumentError: the prompt or a stop token does not fit the model.
    """
    token_ids = await _prompt_token_ids(request.prompt, tokenizer, limits)
    check_token_ids("prompt token_ids", token_ids, limits.vocab_size)
    check_token_ids("stop_token_ids", request.params.stop_token_ids, limits.vocab_size)
    params = replace(
        request.params,
        seed=_seed(request.params),
        max_tokens=fitting_max_tokens(len(token_ids), request.params.max_tokens, limits),
    )
    check_candidates(params, limits)
    return RoutedRequest(
        request_id=request.request_id,
        worker_id=f"{request.request_id}/{secrets.token_hex(8)}",
        namespace=model.namespace,
        kv_form=model.kv_form,
        prompt_token_ids=token_ids,
        block_keys=await _block_keys(token_ids, model, request.cache_salt),
        block_size=model.block_size,
        params=params,
        stop_token_ids=(
            *params.stop_token_ids,
            *(() if params.ignore_eos else model.eos_token_ids),
        ),
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline=deadline,
    )


async def _prompt_token_ids(
    prompt: str | Sequence[int], tokenizer: Tokenizer, limits: RequestLimits
) -> tuple[int, ...]:
    """The prompt's ids; one that cannot fit is refused before it is tokenized or copied."""
    if isinstance(prompt, str):
        check_length("text", prompt, limits.max_total_tokens * tokenizer.longest_token_chars)
        prompt = await encode(tokenizer, prompt)
    check_prompt_length(len(prompt), limits)
    return tuple(prompt)


async def _block_keys(
    token_ids: tuple[int, ...], model: ServedModel, cache_salt: str
) -> tuple[bytes, ...]:
    chain = BlockKeyChain(model.namespace, model.block_size, cache_salt=cache_salt)
    if len(token_ids) <= _LONGEST_INLINE_PROMPT:
        return tuple(chain.extend(token_ids))
    return tuple(await asyncio.to_thread(chain.extend, token_ids))


def _seed(params: SamplingParams) -> int:
    """Whoever resumes the request draws the same noise; greedy decoding draws none."""
    if params.seed is not None:
        return params.seed
    return secrets.randbits(64) if params.temperature > 0 else 0
