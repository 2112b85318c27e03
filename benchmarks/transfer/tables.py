"""Tables of the figures of `baton bench transfer`, and the aims they are judged by. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.report import Cell, Table

__all__ = [
    "aim_table",
    "baseline_table",
    "hidden_table",
    "judge_moves",
    "judge_prompts",
    "move_tables",
    "token_table",
]

Row = Mapping[str, Any]
_MIN_TO_MEMCPY = 0.7
_MIN_TO_RAW_CLIENT = 0.8
_MIN_HIDDEN = 0.9
_BESIDE_MEMCPY = ("shm", "nixl")
_BESIDE_CLIENT = ("redis",)

_MOVE_COLUMNS = (
    *("connector", "blocks", "save ms", "GB/s", "/ memcpy", "/ raw"),
    *("load ms", "GB/s", "/ memcpy", "/ raw"),
)
_NAMES_OF_MOVE = tuple(
    name
    for direction in ("save", "load")
    for name in (
        f"{direction}_ms",
        f"{direction}_gb_per_s",
        f"{direction}_to_memcpy",
        f"{direction}_to_raw_{direction}",
    )
)
_BASELINES = {
    "memcpy_gb_per_s": "memcpy GB/s",
    "digest_gb_per_s": "digest GB/s",
    "raw_save_gb_per_s": "raw save GB/s",
    "raw_load_gb_per_s": "raw load GB/s",
}


def move_tables(rows: Sequence[Row]) -> list[Table]:
    """Returns a table per shape: connectors and numbers of blocks."""
    return [_move_table(shape, _of(shape, rows)) for shape in _shapes(rows)]


def baseline_table(rows: Sequence[Row]) -> Table:
    """Returns the figures of memcpy, digests and raw clients, which ran in the same rounds."""
    cells = [
        [row["shape"], row["backend"], row["num_blocks"], *(row.get(name) for name in _BASELINES)]
        for row in rows
    ]
    columns = ("shape", "connector", "blocks", *_BASELINES.values())
    return Table(
        "Beside them",
        columns,
        cells,
        "One thread copies, or digests, as many bytes that no cache holds. Raw: redis-py alone, "
        "or nixl alone from pool to pool, without digests.",
    )


def hidden_table(rows: Sequence[Row]) -> Table:
    """Returns the times of transfers and of the prefill that hides them."""
    names = ("prefill_ms", "transfer_ms", "exposed_ms", "hidden_share")
    columns = ("connector", "prompt", "prefill ms", "transfer ms", "exposed ms", "hidden share")
    return Table(
        "Transfers behind prefill",
        columns,
        [_prompt_row(row, "hidden", names) for row in rows],
        _with_refusals(
            "Transfer: time of the saves and of the loads, added. Exposed: from the first token "
            "until the last block is saved, and decode's wait for its blocks. "
            "Hidden share: 1 - exposed / transfer.",
            rows,
            ("backend", "prompt_tokens"),
        ),
    )


def token_table(rows: Sequence[Row]) -> Table:
    """Returns when tokens arrive from two tiers and from an undivided engine."""
    columns, names = ["connector", "prompt"], []
    for number in ("first", "second"):
        columns += [f"{number} ms", f"{number} whole ms", "split / whole"]
        names += [f"split_{number}_ms", f"whole_{number}_ms", f"split_to_whole_{number}"]
    measured = [row for row in rows if "tokens" in row]
    cells = [_prompt_row(row, "tokens", names) for row in measured]
    return Table("Time to the first and the second token", columns, cells)


def aim_table(aims: Sequence[Row]) -> Table:
    """Returns each aim, the measured value, and whether it meets the aim."""
    rows: list[list[Cell]] = [
        [aim["what"], aim["at_least"], aim["measured"], "yes" if aim["is_met"] else "no"]
        for aim in aims
    ]
    return Table("Aims", ("aim", "at least", "measured", "met"), rows)


def _move_table(shape: str, rows: Sequence[Row]) -> Table:
    cells = [
        [row["backend"], row["num_blocks"], *(row.get(name) for name in _NAMES_OF_MOVE)]
        for row in rows
    ]
    note = "A peer's save moves nothing: its blocks are digested and lent where they lie."
    if not any(row.get("lends") for row in rows):
        note = ""
    title = f"{shape}, blocks of {rows[0]['block_bytes'] / 1024:g} KiB"
    return Table(title, _MOVE_COLUMNS, cells, _with_refusals(note, rows, ("backend", "num_blocks")))


def _prompt_row(row: Row, part: str, names: Sequence[str]) -> list[Cell]:
    figures = row.get(part, {})
    return [row["backend"], row["prompt_tokens"], *(figures.get(name) for name in names)]


def _with_refusals(note: str, rows: Sequence[Row], names: Sequence[str]) -> str:
    refused = [
        f"{', '.join(str(row[name]) for name in names)}: {row['refused']}"
        for row in rows
        if "refused" in row
    ]
    return " ".join(filter(None, (note, f"Refused: {'; '.join(refused)}." if refused else "")))


def _shapes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["shape"] for row in rows))


def _of(shape: str, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["shape"] == shape]


def judge_moves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the aims of each shape, for the largest number of blocks.

    Args:
        rows: the rows that `measure_moves` yields.
    """
    most = max((row["num_blocks"] for row in rows), default=0)
    return [aim for row in rows if row["num_blocks"] == most for aim in _aims_of_move(row)]


def judge_prompts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the aim of each prompt length whose transfer is shorter than its prefill.

    Args:
        rows: the rows that `measure_prompts` yields.
    """
    judged = []
    for row in rows:
        if "hidden" not in row:
            continue
        hidden = row["hidden"]
        if hidden["transfer_ms"] < hidden["prefill_ms"]:
            what = f"{row['backend']}, {row['prompt_tokens']} tokens: hidden share"
            judged.append(_aim(what, _MIN_HIDDEN, hidden["hidden_share"]))
    return judged


def _aims_of_move(row: Row) -> Iterator[dict[str, Any]]:
    if "refused" in row:
        return
    name = row["backend"]
    # A connector that lends blocks moves nothing when it saves.
    for direction in ("load",) if row["lends"] else ("save", "load"):
        what = f"{name}, {row['shape']}, {row['num_blocks']} blocks: {direction}"
        if name in _BESIDE_MEMCPY:
            yield _aim(f"{what} / memcpy", _MIN_TO_MEMCPY, row[f"{direction}_to_memcpy"])
        if name in _BESIDE_CLIENT:
            ratio = row[f"{direction}_to_raw_{direction}"]
            yield _aim(f"{what} / raw client", _MIN_TO_RAW_CLIENT, ratio)


def _aim(what: str, at_least: float, measured: float) -> dict[str, Any]:
    return {
        "what": what,
        "at_least": at_least,
        "measured": measured,
        "is_met": measured >= at_least,
    }
