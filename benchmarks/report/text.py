"""A report as text for the terminal."""

from collections.abc import Sequence

from benchmarks.report.report import Cell, Report, Table

__all__ = ["format_cell", "format_report", "format_table"]

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
