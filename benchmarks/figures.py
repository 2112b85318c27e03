"""A report's panels as PNG and SVG, drawn by matplotlib, and the report as one HTML page."""

import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from baton.common.errors import ConfigurationError
from benchmarks.report import Panel, Report, Series, Table, format_cell

__all__ = ["panel_svg", "render_page", "write_png"]

try:
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ConfigurationError("plots need matplotlib: pip install 'baton-llm[bench]'") from error

_MAX_COLUMNS = 3
_MAX_LABELS_INSIDE = 4
_MARGIN = 1.04
"""Free space above the curves, as a factor of the largest value."""
_PANEL_INCHES = (5.6, 3.7)
_PIXELS_PER_INCH = 110
_COLOURS = ("#1f5fa8", "#d1652a", "#2f8f5b", "#8a4fa3", "#b5362f", "#6b6b6b", "#b58b00", "#2a9fb0")
_LIMIT_COLOUR = "#9a1b1b"
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=_COLOURS),
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "baton",
}
_PAGE_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; margin: 2rem auto;
       max-width: 1180px; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .4rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
section { max-width: 100%; }
.wide { overflow-x: auto; }
th, td { padding: .28rem .9rem .28rem 0; text-align: right; border-bottom: 1px solid #e6e6e6; }
th { color: #555; font-weight: 600; border-bottom-color: #999; }
th:first-child, td:first-child { text-align: left; }
.note, dl { color: #555; font-size: .88rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(360px, 1fr)); gap: 1.2rem;
         margin-top: 1.6rem; }
.plots svg { width: 100%; height: auto; }
figure { margin: 0; }
.tables { display: flex; flex-wrap: wrap; gap: 0 4rem; align-items: flex-start; }
"""


def write_png(report: Report, path: Path) -> None:
    """Draws all panels into one PNG file."""
    num_columns = min(_MAX_COLUMNS, max(1, len(report.panels)))
    num_rows = max(1, math.ceil(len(report.panels) / num_columns))
    width, height = _PANEL_INCHES
    with mpl.rc_context(_STYLE):
        figure = Figure(
            figsize=(width * num_columns, height * num_rows + 0.5), layout="constrained"
        )
        figure.suptitle(report.title, fontsize=12, x=0.01, ha="left")
        for index, panel in enumerate(report.panels, 1):
            _draw(figure.add_subplot(num_rows, num_columns, index), panel)
        figure.savefig(path, dpi=_PIXELS_PER_INCH, format="png")


def panel_svg(panel: Panel) -> str:
    """Returns one panel as an `<svg>` element."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=_PANEL_INCHES, layout="constrained")
        _draw(figure.add_subplot(), panel)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _draw(axes: Any, panel: Panel) -> None:
    for index, series in enumerate(panel.series):
        _draw_series(axes, series, _COLOURS[index % len(_COLOURS)])
    for label, value in panel.x_limits.items():
        axes.axvline(value, color=_LIMIT_COLOUR, linestyle="--", linewidth=1, label=label)
    for label, value in panel.y_limits.items():
        axes.axhline(value, color=_LIMIT_COLOUR, linestyle="--", linewidth=1, label=label)
    axes.set(
        title=panel.title,
        xlabel=panel.x_label,
        ylabel=panel.y_label,
        xscale=panel.x_scale,
        yscale=panel.y_scale,
    )
    _set_plain_ticks(axes, panel)
    if panel.y_scale == "linear":
        axes.set_ylim(0, _MARGIN * axes.get_ylim()[1])
    if panel.x_scale == "linear":
        axes.set_xlim(0, axes.get_xlim()[1])
    _add_legend(axes, panel)


def _draw_series(axes: Any, series: Series, colour: str) -> None:
    xs, ys, options = series.xs, series.ys, {"label": series.label or None, "color": colour}
    if series.style == "points":
        axes.scatter(xs, ys, s=14, alpha=0.65, linewidths=0, **options)
    elif series.style == "marked":
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=1.5, **options)
    elif series.style == "line":
        axes.plot(xs, ys, linewidth=1.8, **options)
    else:
        axes.step(xs, ys, where="post", linewidth=1.5, **options)
        if series.style == "fill":
            axes.fill_between(xs, ys, step="post", alpha=0.18, color=colour)


def _set_plain_ticks(axes: Any, panel: Panel) -> None:
    """Writes plain numbers instead of powers on logarithmic scales."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for axis, scale in ((axes.xaxis, panel.x_scale), (axes.yaxis, panel.y_scale)):
        if scale == "log":
            axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())


def _add_legend(axes: Any, panel: Panel) -> None:
    """Adds the legend inside the plot, or below it if it would cover much."""
    labels = [*panel.x_limits, *panel.y_limits, *(s.label for s in panel.series if s.label)]
    if len(labels) > _MAX_LABELS_INSIDE:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=_MAX_LABELS_INSIDE)
    elif labels:
        axes.legend()


def render_page(report: Report, svgs: Sequence[str]) -> str:
    """Returns the page.

    Args:
        report: the report.
        svgs: its panels, each as an `<svg>` element.
    """
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(report.title)}</title>",
            f"<style>{_PAGE_STYLE}</style></head><body>",
            f"<h1>{escape(report.title)}</h1>",
            _facts(report.facts),
            f'<div class="tables">{"".join(map(_table, report.tables))}</div>',
            f'<div class="plots">{"".join(f"<figure>{svg}</figure>" for svg in svgs)}</div>',
            "</body></html>\n",
        )
    )


def _facts(facts: Mapping[str, str]) -> str:
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def _table(table: Table) -> str:
    heading = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(format_cell(cell))}</td>' for cell in row)}</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="wide">'
        f"<table><thead><tr>{heading}</tr></thead><tbody>{rows}</tbody></table></div>{note}</section>"
    )
