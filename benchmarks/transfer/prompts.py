"""Prompts through two tiers: what of their transfer prefill hides, and when their tokens come.

Both sides are clusters of real processes with a router. They answer in turn, and no prompt is sent
twice, so that a machine whose speed changes treats both alike and no cache finds a prompt.
"""

import random
import statistics
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from baton.common.errors import BatonError
from benchmarks.cluster import ClusterAnswer, ServedCluster, served_cluster
from benchmarks.models import write_dummy_model
from benchmarks.transfer.end_host import TransferRefusedError
from benchmarks.transfer.plan import Plan, TransferBackend
from engine.config import EngineConfig

__all__ = ["Trace", "hidden_figures", "measure_prompts", "token_figures"]

_BLOCK_SIZE = 16
_SPARE_TOKENS = 64
_NUM_TOKENS = 3
_SAVE_SECONDS = "baton_kv_prompt_save_seconds_total"
_LOAD_SECONDS = "baton_kv_job_seconds_sum load"
_LOADED_BYTES = "baton_kv_bytes_total load"


@dataclass(frozen=True, slots=True)
class Trace:
    """Times and sizes of one prompt.

    Attributes:
        answer: what the client got.
        save_s: time in which the prefill worker saved the prompt's KV.
        load_s: time in which the decode worker loaded it.
        loaded_bytes: size of what it loaded.
    """

    answer: ClusterAnswer
    save_s: float = 0.0
    load_s: float = 0.0
    loaded_bytes: float = 0.0


async def measure_prompts(
    plan: Plan,
    backends: Sequence[TransferBackend],
    num_threads: int,
    layer_slices: Sequence[int],
    *,
    with_whole: bool,
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields a row of figures for each connector, number of layer slices and prompt length.

    Args:
        plan: the model and the prompt lengths.
        backends: connectors; those that only one process can use are left out.
        num_threads: threads that each worker computes on.
        layer_slices: into how many objects a block's layers go; each number is measured.
        with_whole: whether an undivided engine answers the same prompts.
    """
    draw = random.Random(0)  # shared by all connectors: no prompt is sent twice
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        engine = _engine(plan, write_dummy_model(plan.model, Path(folder)), num_threads)
        whole = None
        if with_whole:
            whole = await stack.enter_async_context(served_cluster(engine, num_prefill=0))
        for backend in backends:
            for slices in layer_slices if backend.is_shared else ():
                tiers = replace(
                    engine,
                    kv_connector=backend.url,
                    kv_load_failure_policy="fail",
                    kv_transfer_layer_slices=slices,
                )
                name = f"{backend.name}, layers in {slices}" if slices > 1 else backend.name
                async for row in _measure(plan, tiers, whole, draw):
                    yield {"backend": name, "layer_slices": slices} | row


def hidden_figures(traces: Sequence[Trace]) -> dict[str, float]:
    """Returns medians of how long prefill and transfer took, and how much of the transfer showed.

    Args:
        traces: prompts of one length.
    """
    rows = [_hidden(trace) for trace in traces]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def token_figures(split: Sequence[Trace], whole: Sequence[Trace]) -> dict[str, float]:
    """Returns medians of when the first and the second token came, and their ratios.

    Args:
        split: what the two tiers answered.
        whole: what the undivided engine answered to the same prompts.

    Raises:
        TransferRefusedError: the two sides drew different tokens.
    """
    if [trace.answer.tokens for trace in split] != [trace.answer.tokens for trace in whole]:
        raise TransferRefusedError("two tiers and the undivided engine drew different tokens")
    figures: dict[str, float] = {}
    for index, name in enumerate(("first", "second")):
        split_s, whole_s = (
            [trace.answer.token_times_s[index] for trace in traces] for traces in (split, whole)
        )
        ratios = [ours / theirs for ours, theirs in zip(split_s, whole_s, strict=True)]
        figures |= {
            f"split_{name}_ms": 1e3 * statistics.median(split_s),
            f"whole_{name}_ms": 1e3 * statistics.median(whole_s),
            f"split_to_whole_{name}": statistics.median(ratios),
        }
    return figures


def _hidden(trace: Trace) -> dict[str, float]:
    """A transfer shows from the end of prefill until decode has loaded all of the prompt."""
    timings = trace.answer.timings
    transfer_ms = 1e3 * (trace.save_s + trace.load_s)
    exposed_ms = timings.transfer_ms + timings.load_ms
    return {
        "prefill_ms": timings.prefill_ms,
        "transfer_ms": transfer_ms,
        "exposed_ms": exposed_ms,
        "hidden_share": max(0.0, 1 - exposed_ms / transfer_ms),
    }


async def _measure(
    plan: Plan, engine: EngineConfig, whole: ServedCluster | None, draw: random.Random
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields a row per prompt length; after a failure, rows that say why they have no figures."""
    cases = list(plan.prompts)
    try:
        async with served_cluster(engine, num_prefill=1) as tiers:
            await _ask_both(cases[0].num_tokens, draw, plan, tiers, whole)  # warms up
            while cases:
                case = cases[0]
                asked = whole if case.num_tokens <= plan.whole_prompt_tokens else None
                pairs = [
                    await _ask_both(case.num_tokens, draw, plan, tiers, asked)
                    for _ in range(case.repeats)
                ]
                figures = _figures(plan, case.num_tokens, pairs)
                yield {"prompt_tokens": cases.pop(0).num_tokens} | figures
    except (BatonError, TransferRefusedError) as error:
        for case in cases:
            yield {"prompt_tokens": case.num_tokens, "refused": str(error)}


def _figures(
    plan: Plan, num_tokens: int, pairs: Sequence[tuple[Trace, Trace | None]]
) -> dict[str, Any]:
    split = [trace for trace, _ in pairs]
    whole = [trace for _, trace in pairs if trace is not None]
    _check_computed([*split, *whole])
    _check_loaded(split, num_tokens * plan.kv_bytes_per_token)
    figures: dict[str, Any] = {"hidden": hidden_figures(split)}
    if whole:
        figures["tokens"] = token_figures(split, whole)
    return figures


def _check_computed(traces: Sequence[Trace]) -> None:
    """Refuses figures of prompts of which a part was found instead of computed."""
    if num_found := max(trace.answer.cached_tokens for trace in traces):
        raise TransferRefusedError(f"{num_found} tokens of a prompt were found, and not computed")


def _check_loaded(traces: Sequence[Trace], num_bytes: int) -> None:
    """Refuses figures of prompts that decode computed, or found in its own cache."""
    for trace in traces:
        if trace.loaded_bytes < num_bytes:
            loaded = f"{trace.loaded_bytes:.0f} of at least {num_bytes} bytes"
            raise TransferRefusedError(f"decode loaded {loaded}, and computed the rest")


async def _ask_both(
    num_tokens: int,
    draw: random.Random,
    plan: Plan,
    tiers: ServedCluster,
    whole: ServedCluster | None,
) -> tuple[Trace, Trace | None]:
    prompt = [draw.randrange(plan.model["vocab_size"]) for _ in range(num_tokens)]
    before = await tiers.read_metrics()
    answer = await tiers.ask(prompt, _NUM_TOKENS)
    after = await tiers.read_metrics()
    spent = (after[name] - before[name] for name in (_SAVE_SECONDS, _LOAD_SECONDS, _LOADED_BYTES))
    other = Trace(await whole.ask(prompt, _NUM_TOKENS)) if whole is not None else None
    return Trace(answer, *spent), other


def _engine(plan: Plan, folder: Path, num_threads: int) -> EngineConfig:
    """Configures every worker."""
    longest = max(case.num_tokens for case in plan.prompts) + _SPARE_TOKENS
    return EngineConfig(
        model=str(folder),
        load_format="dummy",
        dtype=plan.model["dtype"],
        device="cpu",
        num_threads=num_threads,
        max_model_len=longest,
        max_num_seqs=1,
        max_num_batched_tokens=plan.chunk_tokens,
        # Room for two prompts: the previous one stays cached.
        num_gpu_blocks_override=2 * longest // _BLOCK_SIZE,
        kv_publish="off",
    )
