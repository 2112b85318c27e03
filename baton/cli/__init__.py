"""The `baton` command. Each subcommand is a module with `add_args` and `main`."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import baton
from baton.errors import BatonError, ConfigurationError

__all__ = ["COMMANDS", "build_parser", "discard_unread_output", "main"]

_DESCRIPTION = (
    "Serves large language models with separate prefill and decode workers behind a router."
)

_EXIT_FAILURE = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141  # the status a shell reports for a program killed by SIGPIPE


@dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand: the module that defines `add_args(parser)` and `main(args)`, and its help."""

    module: str
    help: str


COMMANDS = {
    "up": _Command("baton.cli.up", "run a whole cluster on this machine"),
    "router": _Command("router.server", "run the router, which clients connect to"),
    "prefill": _Command("prefill_service.server", "run a prefill worker"),
    "decode": _Command("decode_service.server", "run a decode worker"),
    "generate": _Command("baton.cli.generate", "complete a prompt over gRPC"),
    "chat": _Command("baton.cli.chat", "talk to a model over OpenAI's HTTP API"),
    "complete": _Command("baton.cli.complete", "complete a prompt over OpenAI's HTTP API"),
    "run-batch": _Command("baton.cli.run_batch", "run a file of requests in OpenAI's batch format"),
    "tune": _Command("benchmarks.tune_command", "search flags for the highest goodput"),
    "bench": _Command("benchmarks.cli", "measure a running endpoint, an engine or its parts"),
    "doctor": _Command("baton.cli.doctor", "check this installation and this machine"),
    "collect-env": _Command("baton.cli.collect_env", "print the facts that a bug report needs"),
    "health": _Command("baton.health", "ask a server whether it is serving"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the console script; returns the exit status."""
    # OpenMP reads this when torch is loaded. Idle threads that spin would take cores from others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = sys.argv[1:] if argv is None else argv
    args = build_parser(arguments[0] if arguments else "").parse_args(arguments)
    run: Callable[[argparse.Namespace], int | None] = args.run
    try:
        status = run(args) or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        discard_unread_output()
        return _EXIT_BROKEN_PIPE
    except BatonError as error:
        sys.stderr.write(f"baton {args.command}: error: {error.message}\n")
        return _EXIT_USAGE if isinstance(error, ConfigurationError) else _EXIT_FAILURE


def build_parser(command: str) -> argparse.ArgumentParser:
    """Builds the parser with the flags of `command` only; other commands are not imported."""
    parser = argparse.ArgumentParser(prog="baton", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"baton {baton.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, entry in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=entry.help, description=entry.help)
        if name == command:
            module = import_module(entry.module)
            subparser.description = module.main.__doc__
            module.add_args(subparser)
            subparser.set_defaults(run=module.main)
    return parser


def discard_unread_output() -> None:
    """Redirects an output stream whose reader has closed the pipe to the null device.

    Call it after a failed write, as in `baton generate ... | head`. The text of that write
    stays in the stream's buffer, so that without the redirection the next write and the flush
    at exit would fail again.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with Path(os.devnull).open("wb") as null_device:
                os.dup2(null_device.fileno(), stream.fileno())
