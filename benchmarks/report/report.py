"""`Report`: tables and plots of a benchmark as plain data; the writers beside it lay them out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Panel", "Report", "Series", "Table"]

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
