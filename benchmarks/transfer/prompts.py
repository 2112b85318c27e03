"""Prompts through two tiers: what of their transfer prefill hides, and when their tokens come.

The router's part is played here: no gRPC and no HTTP is in the figures of either side. Both
sides are asked in turn, on new tokens, so that a machine whose speed drifts treats them alike.
"""

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.transfer.backends import Backend
from benchmarks.transfer.child import ChildError
from benchmarks.transfer.connector_end import RefusedError
from benchmarks.transfer.plan import Plan, PromptCase
from benchmarks.transfer.routes import Trace, TwoTiers, Undivided
from engine.kv_transfer.state import overlap

__all__ = ["hidden_figures", "measure_prompts", "token_figures"]

_BLOCK_SIZE = 16
_SPARE_TOKENS = 64


def measure_prompts(
    plan: Plan,
    backends: Sequence[Backend],
    num_threads: int,
    layer_slices: Sequence[int],
    *,
    with_whole: bool,
) -> Iterator[dict[str, Any]]:
    """Yields, for each connector and length, what is hidden, and when tokens came.

    Args:
        plan: the lengths.
        backends: those that processes share are measured.
        num_threads: that each engine computes on.
        layer_slices: in how many parts a block's layers go; each number is measured.
        with_whole: whether an undivided engine answers, too.
    """
    with TemporaryDirectory() as folder:
        settings = _settings(plan, Path(folder), num_threads)
        draw = random.Random(0)  # for all connectors: no engine and no store has seen a prompt
        with Undivided(settings) if with_whole else nullcontext() as whole:
            for backend in backends:
                for slices in layer_slices if backend.is_shared else ():
                    form = {"kv_transfer_layer_slices": slices}
                    yield from _measure(plan, backend, settings | form, whole, draw)


def hidden_figures(traces: Sequence[Trace]) -> dict[str, float]:
    """Of prompts of one length: how long prefill and transfer took, and the part that showed.

    A transfer shows from the end of prefill until decode begins its first step.
    """
    rows = [_hidden(trace) for trace in traces]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def token_figures(split: Sequence[Trace], whole: Sequence[Trace]) -> dict[str, float]:
    """Of the same prompts: when the first and the second token came, by either way.

    Raises:
        RefusedError: the two ways drew different tokens.
    """
    if [trace.tokens for trace in split] != [trace.tokens for trace in whole]:
        raise RefusedError("two tiers and the undivided engine drew different tokens")
    figures: dict[str, float] = {}
    for number, name in ((1, "first"), (2, "second")):
        split_s, whole_s = (
            [trace.seconds_to_token(number) for trace in traces] for traces in (split, whole)
        )
        ratios = [ours / theirs for ours, theirs in zip(split_s, whole_s, strict=True)]
        figures |= {
            f"split_{name}_ms": 1e3 * statistics.median(split_s),
            f"whole_{name}_ms": 1e3 * statistics.median(whole_s),
            f"split_to_whole_{name}": statistics.median(ratios),
        }
    return figures


def _hidden(trace: Trace) -> dict[str, float]:
    busy_s, _ = overlap(trace.transfers, until=trace.prefill_ended_at)
    exposed_s = max(0.0, trace.ready_at - trace.prefill_ended_at)
    return {
        "prefill_ms": 1e3 * (trace.prefill_ended_at - trace.prefill_began_at),
        "transfer_ms": 1e3 * busy_s,
        "exposed_ms": 1e3 * exposed_s,
        "hidden_share": max(0.0, 1 - exposed_s / busy_s),
    }


def _measure(
    plan: Plan,
    backend: Backend,
    settings: dict[str, Any],
    whole: Undivided | None,
    draw: random.Random,
) -> Iterator[dict[str, Any]]:
    """Where something goes wrong, what, and no figures from there on."""
    cases = list(plan.prompts)
    slices = settings["kv_transfer_layer_slices"]
    name = f"{backend.name}, layers in {slices}" if slices > 1 else backend.name
    facts = {"backend": name, "layer_slices": slices}
    try:
        with TwoTiers(settings, backend.url) as tiers:
            _ask(cases[0].num_tokens, draw, plan, tiers, whole)  # warms up
            while cases:
                figures = _figures(plan, cases[0], draw, tiers, whole)
                yield facts | {"prompt_tokens": cases.pop(0).num_tokens} | figures
    except (ChildError, RefusedError) as error:
        for case in cases:
            yield facts | {"prompt_tokens": case.num_tokens, "refused": str(error)}


def _figures(
    plan: Plan, case: PromptCase, draw: random.Random, tiers: TwoTiers, whole: Undivided | None
) -> dict[str, Any]:
    if case.num_tokens > plan.whole_prompt_tokens:
        whole = None
    pairs = [_ask(case.num_tokens, draw, plan, tiers, whole) for _ in range(case.repeats)]
    split = [trace for trace, _ in pairs]
    _check_computed([trace for pair in pairs for trace in pair if trace is not None])
    _check_loaded(split, case.num_tokens)
    figures: dict[str, Any] = {"hidden": hidden_figures(split)}
    if whole is not None:
        figures["tokens"] = token_figures(split, [trace for _, trace in pairs if trace])
    return figures


def _check_computed(traces: Sequence[Trace]) -> None:
    """Refuses figures of prompts of which a part was found instead of computed."""
    if num_found := max(trace.num_found_tokens for trace in traces):
        raise RefusedError(f"{num_found} tokens of a prompt were found, and not computed")


def _check_loaded(traces: Sequence[Trace], num_tokens: int) -> None:
    """Refuses figures of prompts that decode computed, or found in its own cache."""
    for trace in traces:
        if trace.num_loaded_tokens != num_tokens:
            loaded = f"{trace.num_loaded_tokens} of {num_tokens} tokens"
            raise RefusedError(f"decode loaded {loaded}, and computed the rest")
        if not trace.transfers:
            raise RefusedError("no save and no load was seen")


def _ask(
    num_tokens: int, draw: random.Random, plan: Plan, tiers: TwoTiers, whole: Undivided | None
) -> tuple[Trace, Trace | None]:
    prompt = [draw.randrange(plan.model["vocab_size"]) for _ in range(num_tokens)]
    return tiers.ask(prompt), whole.ask(prompt) if whole is not None else None


def _settings(plan: Plan, folder: Path, num_threads: int) -> dict[str, Any]:
    """Of all engines."""
    (folder / "config.json").write_text(json.dumps(dict(plan.model)))
    longest = max(case.num_tokens for case in plan.prompts) + _SPARE_TOKENS
    return {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": plan.model["dtype"],
        "device": "cpu",
        "num_threads": num_threads,
        "max_model_len": longest,
        "max_num_seqs": 1,
        "max_num_batched_tokens": plan.chunk_tokens,
        # The prompt before stays cached beside the present one.
        "num_gpu_blocks_override": 2 * longest // _BLOCK_SIZE,
        "kv_publish": "off",
    }
