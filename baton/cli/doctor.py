"""`baton doctor`: checks the installation and the machine, or running workers, and prints the
findings.
"""

import argparse
import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial

from baton.doctor import Finding, Level, gpus, machine, native_kernels, ranks, software

__all__ = ["add_args", "examine", "format_findings", "main"]

_LEVEL_WIDTH = 8
_TOPIC_WIDTH = 21
_MIN_TEXT_WIDTH = 40

_Check = Callable[[], Iterable[Finding]]

_CHECKS: tuple[_Check, ...] = (
    software.check_versions,
    software.check_requirements,
    software.check_names,
    software.check_torch,
    gpus.check_gpus,
    machine.check_cpu,
    machine.check_cores,
    machine.check_threads,
    native_kernels.check_selection,
    native_kernels.check_result,
    ranks.check_ranks,
    native_kernels.check_libraries,
    native_kernels.check_compiler,
    machine.check_tasks,
    machine.check_files,
    machine.check_memory,
    machine.check_shared_memory,
    software.check_extras,
)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--kv-connector",
        metavar="URL",
        help="also try this KV connector, such as redis://host:port/db or grpc://",
    )
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="check not this machine but what a running worker, or all workers of a router, "
        "see of their KV connectors; the gRPC address, given once for each",
    )
    try:
        from baton.cli.operator_calls import add_credential_args
    except ModuleNotFoundError:  # `check_requirements` names what is missing
        return
    add_credential_args(parser)


def main(args: argparse.Namespace) -> int:
    """Reports versions, cores, memory and the CPU kernels in use, with the reason for each choice;
    with --target what running workers see of their KV connectors.

    The exit status is 1 if something does not work.
    """
    findings = examine_running(args) if args.target else examine(args.kv_connector)
    has_problem = any(finding.level is Level.PROBLEM for finding in findings)
    if args.json:
        report = {"ok": not has_problem, "findings": list(map(asdict, findings))}
        print(json.dumps(report, indent=2))
    else:
        print(*format_findings(findings), sep="\n")
    return 1 if has_problem else 0


def examine(kv_connector: str | None = None) -> list[Finding]:
    """Runs every check; returns all findings in the order of the report.

    Args:
        kv_connector: URL of a KV connector to try; None for none.
    """
    checks = [*_CHECKS]
    if kv_connector is not None:
        checks.append(partial(_check_connector, kv_connector))
    return [finding for check in checks for finding in _findings_of(check)]


def examine_running(args: argparse.Namespace) -> list[Finding]:
    """Asks the running processes that `--target` names; tries `--kv-connector` too if it is given.

    Raises:
        ConfigurationError: a file of a credential cannot be read; names the flag.
    """
    from baton.cli.operator_calls import operator_channel
    from baton.doctor.running import check_running

    findings: list[Finding] = []
    for address in args.target:
        with operator_channel(args, address) as (channel, metadata):
            findings += check_running(address, channel, metadata)
    if args.kv_connector is not None:
        findings += _findings_of(partial(_check_connector, args.kv_connector))
    return findings


def _check_connector(url: str) -> Iterable[Finding]:
    from baton.doctor import connectors  # here, as it imports every connector

    return connectors.check_connector(url)


def _findings_of(check: _Check) -> list[Finding]:
    """Returns a check's findings; an exception becomes a finding, since it is what we look for."""
    name = getattr(getattr(check, "func", check), "__name__", "check")
    topic = name.strip("_").removeprefix("check_").replace("_", " ")
    try:
        return list(check())
    except ModuleNotFoundError as error:
        if error.name != "torch":  # `check_torch` reports that it is missing
            return [Finding(topic, Level.PROBLEM, str(error))]
        return [Finding(topic, Level.NOTE, "not checked: it needs torch")]
    except Exception as error:
        return [Finding(topic, Level.PROBLEM, f"{type(error).__name__}: {error}")]


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """Returns the findings as lines of text, wrapped to the terminal's width."""
    indent = " " * (_LEVEL_WIDTH + _TOPIC_WIDTH)
    width = max(shutil.get_terminal_size().columns, len(indent) + _MIN_TEXT_WIDTH)
    lines = []
    for finding in findings:
        lead = f"{finding.level:<{_LEVEL_WIDTH}}{finding.topic:<{_TOPIC_WIDTH - 1}} "
        lines += textwrap.wrap(
            finding.text,
            width,
            initial_indent=lead,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines
