"""Measures how quickly connectors move blocks between pools, beside memcpy and raw clients."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.transfer.backends import TransferBackend
from benchmarks.transfer.end_host import TransferRefusedError
from benchmarks.transfer.ends import ChildError, Ends, open_ends
from benchmarks.transfer.plan import Plan
from benchmarks.transfer.raw import ColdMemory, RawMoves, open_raw
from kvstore.layout import KvLayout

__all__ = ["measure_moves"]

_PUBLISHER, _READER = "publisher", "reader"


def measure_moves(plan: Plan, backends: Sequence[TransferBackend]) -> Iterator[dict[str, Any]]:
    """Yields a row of figures for each shape, connector and number of blocks."""
    num_blocks = max(plan.rounds)
    most_bytes = num_blocks * max(layout.block_bytes for layout in plan.shapes.values())
    memory = ColdMemory(most_bytes, plan.least_cold_bytes)
    for shape, layout in plan.shapes.items():
        for backend in backends:
            facts = {"shape": shape, "block_bytes": layout.block_bytes, "backend": backend.name}
            for count, figures in _measure(plan, backend, layout, memory):
                yield facts | {"num_blocks": count} | figures


def _measure(
    plan: Plan, backend: TransferBackend, layout: KvLayout, memory: ColdMemory
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields figures by number of blocks; after a failure, rows that say why there are none."""
    counts = list(plan.rounds)
    try:
        with open_ends(layout, max(counts), is_shared=backend.is_shared) as ends:
            ends.publisher.call("open", _PUBLISHER, backend.url)
            ends.reader.call("open", _READER, backend.url)
            raw = open_raw(backend, ends)
            while counts:
                num_rounds, num_bytes = plan.rounds[counts[0]], counts[0] * layout.block_bytes
                rounds = [
                    _round(ends, raw, f"{counts[0]}-{index}", counts[0])
                    | {"memcpy": memory.copy_s(num_bytes), "digest": memory.digest_s(num_bytes)}
                    for index in range(1 + num_rounds)
                ]
                yield counts.pop(0), {"lends": backend.lends} | _figures(rounds[1:], num_bytes)
    except (ChildError, TransferRefusedError) as error:
        yield from ((count, {"refused": str(error)}) for count in counts)


def _round(ends: Ends, raw: RawMoves, run_id: str, count: int) -> dict[str, float]:
    """Returns the seconds of each move, and deletes what was moved."""
    block_ids = ends.take_blocks(count)
    save_s, handoff = ends.publisher.call("save", _PUBLISHER, run_id, block_ids)
    load_s = ends.reader.call("load", _READER, handoff, ends.reader_ids(block_ids))
    ends.check_landed(block_ids)
    ends.publisher.call("forget", _PUBLISHER, run_id, count)
    return {"save": save_s, "load": load_s} | raw.move(run_id, count)


def _figures(rounds: Sequence[dict[str, float]], num_bytes: int) -> dict[str, Any]:
    """Returns medians. A ratio is the median of the ratios of the rounds."""
    figures: dict[str, Any] = {}
    for name in rounds[0]:
        seconds = statistics.median(each[name] for each in rounds)
        figures |= {f"{name}_ms": 1e3 * seconds, f"{name}_gb_per_s": num_bytes / seconds / 1e9}
    for name in ("save", "load"):
        for other in ("memcpy", f"raw_{name}"):
            if other in rounds[0]:
                ratios = [each[other] / each[name] for each in rounds]
                figures[f"{name}_to_{other}"] = statistics.median(ratios)
    return figures
