"""Measures the cost of prefix caching if no prefix is ever found.

Keys, index and look-ups of blocks cost less than the time of a model varies. So the same requests
run twice: in the scheduler alone, which gives the cost, and on a model of random weights on the
CPU, which gives the time that the cost is a share of. Engines with and without prefix caching take
turns, and their greedy tokens must be equal.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import make_random_model
from benchmarks.scheduling.served_load import (
    NullRunner,
    greedy_request,
    new_scheduler,
    random_prompt,
)
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineOutput, EngineRequest

__all__ = ["measure_prefix_cost"]

_PROMPT_TOKENS = 256
_OUTPUT_TOKENS = 32
_NUM_REQUESTS = 8
_NUM_TOKENS = _NUM_REQUESTS * (_PROMPT_TOKENS + _OUTPUT_TOKENS)
_ALONE_ROUNDS = 300
_MODEL_ROUNDS = 7
_BLOCK_SIZE = 16
_NUM_BLOCKS = 4096

Tokens = dict[str, list[int]]
Serve = Callable[[list[EngineRequest]], Tokens]
Seconds = dict[bool, list[float]]  # the seconds of each round, by whether prefix caching is on


def measure_prefix_cost() -> dict[str, Any]:
    """Returns the cost of prefix caching per token, and as a share of the engine's time."""
    alone = _take_turns(_serve_alone, _ALONE_ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        path = make_random_model("llama-100m", Path(folder))
        engine = _take_turns(lambda is_on: _serve_on_model(path, is_on), _MODEL_ROUNDS)
    cost_ns = _per_token(alone[True]) - _per_token(alone[False])
    return {
        "model": "llama-100m, random, bfloat16",
        "num_requests": _NUM_REQUESTS,
        "prompt_tokens": _PROMPT_TOKENS,
        "output_tokens": _OUTPUT_TOKENS,
        "scheduler_with_ns_per_token": _per_token(alone[True]),
        "scheduler_without_ns_per_token": _per_token(alone[False]),
        "cost_ns_per_token": cost_ns,
        "tokens_per_s_at_1_percent": round(1e7 / cost_ns),
        "engine_with_us_per_token": _per_token(engine[True]) / 1e3,
        "engine_without_us_per_token": _per_token(engine[False]) / 1e3,
        "share_of_engine": cost_ns / _per_token(engine[False]),
        "engine_with_to_without": [
            round(with_s / without_s, 4)
            for with_s, without_s in zip(engine[True], engine[False], strict=True)
        ],
    }


def _per_token(seconds: list[float]) -> int:
    return round(statistics.median(seconds) * 1e9 / _NUM_TOKENS)


def _take_turns(new_server: Callable[[bool], Serve], num_rounds: int) -> Seconds:
    """Serves the same new prompts with and without prefix caching, after a warm-up round."""
    servers = {is_on: new_server(is_on) for is_on in (True, False)}
    seconds: Seconds = {True: [], False: []}
    for number in range(num_rounds + 1):
        requests = _make_requests(number)
        tokens = {}
        for is_on in (True, False) if number % 2 else (False, True):
            started = time.perf_counter()
            tokens[is_on] = servers[is_on](requests)
            seconds[is_on].append(time.perf_counter() - started)
        if tokens[True] != tokens[False] or len(tokens[True]) != _NUM_REQUESTS:
            raise RuntimeError("tokens with and without prefix caching differ")
    return {is_on: taken[1:] for is_on, taken in seconds.items()}


def _make_requests(seed: int) -> list[EngineRequest]:
    draw = random.Random(seed)
    return [
        greedy_request(
            f"request-{seed}-{index}",
            random_prompt(draw, _PROMPT_TOKENS, vocab_size=1 << 14),
            _OUTPUT_TOKENS,
        )
        for index in range(_NUM_REQUESTS)
    ]


def _serve_alone(is_on: bool) -> Serve:
    scheduler = new_scheduler(_NUM_REQUESTS, _NUM_BLOCKS, enable_prefix_caching=is_on)
    runner = NullRunner()

    def serve(requests: list[EngineRequest]) -> Tokens:
        tokens: Tokens = {}
        for request in requests:
            scheduler.add(request)
        while (batch := scheduler.schedule()) is not None:
            for output in scheduler.commit(batch, runner.execute(batch)):
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if scheduler.kv.num_hits:
            raise RuntimeError("a new prompt was found in the cache")
        return tokens

    return serve


def _serve_on_model(path: Path, is_on: bool) -> Serve:
    core = EngineCore.build(
        EngineConfig(
            model=str(path),
            device="cpu",
            block_size=_BLOCK_SIZE,
            num_gpu_blocks_override=_NUM_BLOCKS,
            max_num_seqs=_NUM_REQUESTS,
            enable_prefix_caching=is_on,
        )
    )

    def serve(requests: list[EngineRequest]) -> Tokens:
        tokens: Tokens = {}

        def take(outputs: list[EngineOutput]) -> None:
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)

        for request in requests:
            core.add_request(request)
        while core.has_unfinished:
            core.run_step(take)
        if core.load().prefix_cache_hits:
            raise RuntimeError("a new prompt was found in the cache")
        return tokens

    return serve
