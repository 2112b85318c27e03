"""`Report`: tables and plots of a benchmark as plain data; the writers beside it lay them out.

A report as text for the terminal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Panel", "Report", "Series", "Table", "format_cell", "format_report", "format_table"]

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Table:
    """Figures in rows.

    Attributes:
        title: above it.
        columns: their headings, with units.
        rows: as many cells as there are columns; None is empty.
        note: below it; empty for none.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a plot.

    Attributes:
        label: in the legend; empty for none.
        xs: of the points.
        ys: of the points.
        style: how they are drawn; steps hold a value until the next point, fill also
            colours the area below.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: Literal["line", "steps", "fill", "points", "marked"] = "line"


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot.

    Attributes:
        title: above it.
        x_label: with its unit.
        y_label: with its unit.
        series: what is drawn.
        x_limits: label -> a value that a vertical line marks.
        y_limits: label -> a value that a horizontal line marks.
        x_scale: "linear" or "log".
        y_scale: "linear" or "log".
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_limits: Mapping[str, float] = field(default_factory=dict)
    y_limits: Mapping[str, float] = field(default_factory=dict)
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark found.

    Attributes:
        title: names the benchmark and what was measured.
        facts: what the figures depend on, in words.
        tables: figures in words.
        panels: plots.
        results: everything, for programs: what the JSON holds.
    """

    title: str
    facts: Mapping[str, str]
    tables: Sequence[Table]
    panels: Sequence[Panel]
    results: Mapping[str, Any]


_SIGNIFICANT_DIGITS = 4


def format_report(report: Report) -> str:
    """Title, facts and tables, with a line between."""
    facts = "\n".join(f"  {name}: {value}" for name, value in report.facts.items())
    return "\n\n".join([f"{report.title}\n{facts}", *map(format_table, report.tables)])


def format_table(table: Table) -> str:
    """Title, aligned columns, note. The first column is to the left, the others to the right."""
    rows = [list(table.columns), *([format_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading, *body = (_align(row, widths) for row in rows)
    rule = "  ".join("-" * width for width in widths)
    lines = [table.title, heading, rule, *body]
    return "\n".join([*lines, table.note] if table.note else lines)


def format_cell(cell: Cell) -> str:
    """Numbers with four significant digits, and none after the point where there are as many."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else cell
    num_before_point = len(str(int(abs(cell))))
    return f"{cell:,.{max(0, _SIGNIFICANT_DIGITS - num_before_point)}f}"


def _align(row: Sequence[str], widths: Sequence[int]) -> str:
    first = row[0].ljust(widths[0])
    others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
    return "  ".join([first, *others]).rstrip()
