"""Writes reports to the terminal and to files; the flags that name them, and those of numbers."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.common.errors import ConfigurationError
from benchmarks.machine import in_words, name_machine
from benchmarks.report import Panel, Report, Table, format_report

__all__ = [
    "add_device_arg",
    "add_number",
    "add_numbers",
    "add_output_args",
    "check_output_args",
    "flags_of",
    "report_of_run",
    "write_line",
    "write_report",
    "write_results",
    "write_so_far",
]

_NO_FLAGS = ("command", "benchmark", "run", "run_benchmark", "api_key")
"""Attributes of parsed arguments that are no flags, and a secret."""


def add_output_args(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`, `--plot` and `--html`."""
    group = parser.add_argument_group("output")
    for flag, text in (
        ("--json", "write figures, machine, commit and flags here"),
        ("--plot", "write the plots here, as PNG"),
        ("--html", "write one page of tables and plots here"),
    ):
        group.add_argument(flag, type=Path, metavar="FILE", help=text)


def check_output_args(args: argparse.Namespace) -> None:
    """Checks the flags before anything is measured.

    Raises:
        ConfigurationError: a file cannot be written, or matplotlib is not installed.
    """
    for flag in ("json", "plot", "html"):
        path: Path | None = getattr(args, flag)
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"--{flag} is {path}; there is no folder {path.parent}")
    if args.plot or args.html:
        import benchmarks.figures  # noqa: F401 - its error says what to install


def write_report(report: Report, args: argparse.Namespace) -> None:
    """Prints the report, and writes the files that parsed flags name."""
    print(format_report(report))
    if args.json:
        write_results(args.json, report.content)
    if args.plot:
        from benchmarks.figures import write_png

        write_png(report, args.plot)
    if args.html:
        from benchmarks.figures import panel_svg, render_page

        args.html.write_text(render_page(report, [panel_svg(panel) for panel in report.panels]))


def report_of_run(
    args: argparse.Namespace,
    title: str,
    tables: Sequence[Table],
    *,
    machine: Mapping[str, Any] | None = None,
    facts: Mapping[str, str] = MappingProxyType({}),
    panels: Sequence[Panel] = (),
    **results: Any,
) -> Report:
    """Returns the report of a run, with its machine and flags.

    Args:
        args: the parsed flags.
        title: the name of the benchmark and of what was measured.
        tables: the figures, for readers.
        machine: where it ran; None for this machine's names.
        facts: the other conditions, for readers.
        panels: the plots.
        results: all figures, for programs.
    """
    machine = machine or name_machine()
    return Report(
        title,
        {"machine": in_words(machine), **facts},
        tables,
        panels,
        {"machine": machine, "flags": flags_of(args), **results},
    )


def flags_of(args: argparse.Namespace) -> dict[str, object]:
    """Returns the flags that were set, for the JSON."""
    values = {name: value for name, value in vars(args).items() if name not in _NO_FLAGS}
    return {name: value for name, value in values.items() if value is not None}


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a JSON file. A reader never sees a part of it, even after an interruption."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n")
    unfinished.replace(path)


def write_so_far(args: argparse.Namespace, make_report: Callable[[], Report]) -> None:
    """Writes the file of --json, if there is one, while a run goes on: what it has measured stays
    if it ends early.

    Args:
        args: the parsed flags.
        make_report: returns the report of the figures so far.
    """
    if args.json:
        write_results(args.json, make_report().content)


def write_line(line: str) -> None:
    """Writes a line to stderr, where it does not mix with a report."""
    sys.stderr.write(f"{line}\n")


def add_device_arg(parser: argparse.ArgumentParser, text: str, default: str = "cpu") -> None:
    """Adds `--device`.

    Args:
        parser: gets the flag.
        text: its meaning; the default is appended.
        default: its value without it.
    """
    shown = f"{text} (default: %(default)s)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help=shown)


def add_number(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    """Adds a flag that takes a number.

    Args:
        parser: gets the flag.
        name: the flag, with its dashes.
        default: its value without it.
        text: its meaning; the default is appended.
    """
    shown = f"{text} (default: %(default)s)"
    parser.add_argument(name, type=int, default=default, metavar="N", help=shown)


def add_numbers(parser: argparse.ArgumentParser, name: str, default: list[int], text: str) -> None:
    """Adds a flag that takes several numbers; the arguments are those of `add_number`."""
    shown = f"{text} (default: {' '.join(map(str, default))})"
    parser.add_argument(name, type=int, nargs="+", default=default, metavar="N", help=shown)
