"""The figures as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report.report import Cell, Table

__all__ = ["aim_table", "baseline_table", "hidden_table", "move_tables", "token_table"]

Row = Mapping[str, Any]

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
    """One per shape, of connectors and numbers of blocks."""
    return [_move_table(shape, _of(shape, rows)) for shape in _shapes(rows)]


def baseline_table(rows: Sequence[Row]) -> Table:
    """What was measured beside the connectors, in the same rounds."""
    cells = [
        [row["shape"], row["backend"], row["num_blocks"], *(row.get(name) for name in _BASELINES)]
        for row in rows
    ]
    columns = ("shape", "connector", "blocks", *_BASELINES.values())
    return Table(
        "Beside them",
        columns,
        cells,
        "One thread copies, or digests, as many bytes that are in no cache. Raw: Redis's own "
        "client, or nixl from pool to pool, without digests.",
    )


def hidden_table(rows: Sequence[Row]) -> Table:
    """Transfers beside the prefill that hides them."""
    names = ("prefill_ms", "transfer_ms", "exposed_ms", "hidden_share")
    columns = ("connector", "prompt", "prefill ms", "transfer ms", "exposed ms", "hidden share")
    return Table(
        "Transfers behind prefill",
        columns,
        [_prompt_row(row, "hidden", names) for row in rows],
        _with_refusals(
            "Transfer: time in which saves or loads ran. Exposed: from the first token until "
            "decode has all of the prompt. Hidden share: 1 - exposed / transfer.",
            rows,
            ("backend", "prompt_tokens"),
        ),
    )


def token_table(rows: Sequence[Row]) -> Table:
    """When tokens come, from two tiers and from an undivided engine."""
    columns, names = ["connector", "prompt"], []
    for number in ("first", "second"):
        columns += [f"{number} ms", f"{number} whole ms", "split / whole"]
        names += [f"split_{number}_ms", f"whole_{number}_ms", f"split_to_whole_{number}"]
    measured = [row for row in rows if "tokens" in row]
    cells = [_prompt_row(row, "tokens", names) for row in measured]
    return Table("Time to the first and the second token", columns, cells)


def aim_table(aims: Sequence[Row]) -> Table:
    """What was to be reached."""
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
