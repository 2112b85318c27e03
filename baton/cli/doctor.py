"""`baton doctor`: what this installation runs on, which kernels it uses, and what is wrong."""

import argparse
import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from baton.doctor import Finding, Level, examine

__all__ = ["add_args", "main"]

_LEVEL_WIDTH = 8
_TOPIC_WIDTH = 21
_LEAST_TEXT_WIDTH = 40


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--json", action="store_true", help="for programs, on stdout")
    parser.add_argument(
        "--kv-connector",
        metavar="URL",
        help="also try this KV connector, such as redis://host:port/db or grpc://",
    )


def main(args: argparse.Namespace) -> int:
    """Says what Baton finds on this machine, and why it runs as it does: versions, cores,
    memory, CPU kernels. Exit status 1 if something is broken.
    """
    findings = examine(args.kv_connector)
    is_broken = any(finding.level is Level.PROBLEM for finding in findings)
    if args.json:
        print(json.dumps({"ok": not is_broken, "findings": list(map(asdict, findings))}, indent=2))
    else:
        _print_page(findings)
    return 1 if is_broken else 0


def _print_page(findings: Sequence[Finding]) -> None:
    indent = " " * (_LEVEL_WIDTH + _TOPIC_WIDTH)
    width = max(shutil.get_terminal_size().columns, len(indent) + _LEAST_TEXT_WIDTH)
    for finding in findings:
        lead = f"{finding.level:<{_LEVEL_WIDTH}}{finding.topic:<{_TOPIC_WIDTH}}"
        print(
            textwrap.fill(
                finding.text,
                width,
                initial_indent=lead,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
