"""`Report`: tables and plots of a benchmark as plain data, and its form as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "Panel",
    "Report",
    "Series",
    "Table",
    "describe_error",
    "format_cell",
    "format_report",
    "format_table",
]

_SIGNIFICANT_DIGITS = 4
_MAX_ERROR_CHARS = 500

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        title: the line above it.
        columns: the headings, with units.
        rows: each row has a cell per column; None is an empty cell.
        note: a text below it; empty for none.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a plot.

    Attributes:
        label: the text in the legend; empty for none.
        xs: the points' x coordinates.
        ys: the points' y coordinates.
        style: how the points are drawn. "steps" keeps a value until the next point; "fill" also
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
        title: the line above it.
        x_label: label of the x axis, with the unit.
        y_label: label of the y axis, with the unit.
        series: the curves.
        x_limits: for each label, a value that a vertical line marks.
        y_limits: for each label, a value that a horizontal line marks.
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
    """The results of a benchmark.

    Attributes:
        title: the name of the benchmark and of what was measured.
        facts: the conditions of the run, for readers.
        tables: the figures, for readers.
        panels: the plots.
        results: all figures, for programs.
    """

    title: str
    facts: Mapping[str, str]
    tables: Sequence[Table]
    panels: Sequence[Panel]
    results: Mapping[str, Any]

    @property
    def content(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return {"title": self.title, **self.results}


def describe_error(error: Exception) -> str:
    """Returns the type and the text of an error that ended a figure, but not the others."""
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]


def format_report(report: Report) -> str:
    """Returns title, facts and tables, separated by empty lines."""
    facts = "\n".join(f"  {name}: {value}" for name, value in report.facts.items())
    return "\n\n".join([f"{report.title}\n{facts}", *map(format_table, report.tables)])


def format_table(table: Table) -> str:
    """Returns title, aligned columns and note. The first column is left-aligned, others right."""
    rows = [list(table.columns), *([format_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading, *body = (_align(row, widths) for row in rows)
    rule = "  ".join("-" * width for width in widths)
    lines = [table.title, heading, rule, *body]
    return "\n".join([*lines, table.note] if table.note else lines)


def format_cell(cell: Cell) -> str:
    """Returns a cell as text. Floats get four significant digits, or all digits of the integer part
    if those are more.
    """
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
