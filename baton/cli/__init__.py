"""The `baton` command. Each subcommand is a module with `add_args` and `main`."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import baton
from baton.cli.unread_output import discard_unread_output
from baton.errors import BatonError, ConfigurationError

__all__ = ["main"]

_EXIT_FAILURE = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141  # what a shell calls a program that SIGPIPE ended


@dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand: where its `add_args(parser)` and `main(args)` are, and its help."""

    module: str
    help: str


_COMMANDS = {
    "up": _Command("baton.cli.up", "run a whole cluster on this machine"),
    "router": _Command("router.server", "run the router, which clients talk to"),
    "prefill": _Command("prefill_service.server", "run a prefill worker"),
    "decode": _Command("decode_service.server", "run a decode worker"),
    "generate": _Command("baton.cli.generate", "complete a prompt and stream the text"),
    "tune": _Command("benchmarks.tune_command", "find the flags that serve the most in time"),
    "bench": _Command("benchmarks.cli", "measure: a running endpoint, an engine, its parts"),
    "doctor": _Command("baton.cli.doctor", "say what this machine offers, and what is wrong"),
    "health": _Command("baton.cli.health", "ask a server whether it serves"),
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    # Read once, when torch is loaded: its threads would spin on the cores of others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = sys.argv[1:] if argv is None else argv
    args = _build_parser(arguments[0] if arguments else "").parse_args(arguments)
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


def _build_parser(command: str) -> argparse.ArgumentParser:
    """The parser, with the flags of `command` alone: the others' modules stay unimported."""
    parser = argparse.ArgumentParser(prog="baton", description=baton.__doc__)
    parser.add_argument("--version", action="version", version=f"baton {baton.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, entry in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=entry.help, description=entry.help)
        if name == command:
            module = import_module(entry.module)
            subparser.description = module.main.__doc__
            module.add_args(subparser)
            subparser.set_defaults(run=module.main)
    return parser
