"""What transfers are to reach, and whether they did."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["judge_moves", "judge_prompts"]

_LEAST_TO_MEMCPY = 0.7
_LEAST_TO_RAW_CLIENT = 0.8
_LEAST_HIDDEN = 0.9
_BESIDE_MEMCPY = ("shm", "nixl")
_BESIDE_CLIENT = ("redis",)

Row = Mapping[str, Any]


def judge_moves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each shape, the aims for the most blocks that were moved at once.

    Args:
        rows: as `measure_moves` yields them.
    """
    most = max((row["num_blocks"] for row in rows), default=0)
    return [aim for row in rows if row["num_blocks"] == most for aim in _aims_of_move(row)]


def judge_prompts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each length, how much is hidden, where the transfer is shorter than the prefill.

    Args:
        rows: as `measure_prompts` yields them.
    """
    judged = []
    for row in rows:
        if "hidden" not in row:
            continue
        hidden = row["hidden"]
        if hidden["transfer_ms"] < hidden["prefill_ms"]:
            what = f"{row['backend']}, {row['prompt_tokens']} tokens: hidden share"
            judged.append(_aim(what, _LEAST_HIDDEN, hidden["hidden_share"]))
    return judged


def _aims_of_move(row: Row) -> Iterator[dict[str, Any]]:
    if "refused" in row:
        return
    name = row["backend"]
    # What only lends moves nothing when it saves.
    for direction in ("load",) if row["lends"] else ("save", "load"):
        what = f"{name}, {row['shape']}, {row['num_blocks']} blocks: {direction}"
        if name in _BESIDE_MEMCPY:
            yield _aim(f"{what} / memcpy", _LEAST_TO_MEMCPY, row[f"{direction}_to_memcpy"])
        if name in _BESIDE_CLIENT:
            ratio = row[f"{direction}_to_raw_{direction}"]
            yield _aim(f"{what} / raw client", _LEAST_TO_RAW_CLIENT, ratio)


def _aim(what: str, at_least: float, measured: float) -> dict[str, Any]:
    return {
        "what": what,
        "at_least": at_least,
        "measured": measured,
        "is_met": measured >= at_least,
    }
