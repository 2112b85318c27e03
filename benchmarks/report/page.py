"""Renders a report as one HTML page that needs no other file."""

from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.report.report import Report, Table, format_cell

__all__ = ["render_page"]

_STYLE = """
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
            f"<style>{_STYLE}</style></head><body>",
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
