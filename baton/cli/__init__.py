"""The `baton` command. Each subcommand is a module with `add_args` and `main`."""

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from typing_extensions import override

import baton
from baton.common.container_limits import check_command
from baton.common.errors import BatonError, ConfigurationError
from baton.common.flags.parser import FlagParser
from baton.common.own_packages import PACKAGES
from worker.processes.output import discard_unread_output

__all__ = ["COMMANDS", "build_parser", "main"]

_DESCRIPTION = (
    "Serves large language models with separate prefill and decode workers behind a router."
)

_EXIT_FAILURE = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141  # the status a shell reports for a program killed by SIGPIPE


@dataclass(frozen=True, slots=True)
class _CommandInfo:
    """A subcommand: the module that defines `add_args(parser)` and `main(args)`, and its help."""

    group: str
    module: str
    help: str


_SERVE, _USE, _CHECK = "Serve a model", "Use a server", "Measure and check"

COMMANDS = {
    "serve": _CommandInfo(_SERVE, "baton.cli.serve", "serve a model on this machine"),
    "router": _CommandInfo(_SERVE, "baton.cli.router", "run the router, which clients connect to"),
    "prefill": _CommandInfo(_SERVE, "worker.prefill", "run a prefill worker"),
    "decode": _CommandInfo(_SERVE, "worker.decode", "run a decode worker"),
    "role": _CommandInfo(_SERVE, "baton.cli.role", "change the tier of a running worker"),
    "scale": _CommandInfo(_SERVE, "baton.cli.scale", "change the number of workers at an address"),
    "api-key": _CommandInfo(_SERVE, "baton.cli.api_key", "make a key for a client of the router"),
    "chat": _CommandInfo(_USE, "baton.cli.chat", "talk to a model"),
    "complete": _CommandInfo(_USE, "baton.cli.complete", "complete a prompt"),
    "run-batch": _CommandInfo(
        _USE, "baton.cli.run_batch", "run a file of requests, OpenAI's batches"
    ),
    "generate": _CommandInfo(_USE, "baton.cli.generate", "complete a prompt over gRPC"),
    "top": _CommandInfo(_USE, "baton.cli.top", "watch a router and its replicas"),
    "trace": _CommandInfo(_USE, "baton.cli.trace", "show where the time of a request went"),
    "health": _CommandInfo(_USE, "rpc.probe", "ask a server whether it is serving"),
    "bench": _CommandInfo(
        _CHECK, "benchmarks.cli", "measure a running endpoint, an engine or its parts"
    ),
    "tune": _CommandInfo(_CHECK, "benchmarks.tune_command", "search flags for the highest goodput"),
    "doctor": _CommandInfo(_CHECK, "baton.cli.doctor", "check this installation and this machine"),
    "collect-env": _CommandInfo(_CHECK, "baton.cli.collect_env", "print what a bug report needs"),
    "completion": _CommandInfo(_CHECK, "baton.cli.completion", "print the shell's completion code"),
}

_EARLIER_NAMES = {"up": "serve"}
_HELP = frozenset(("-h", "--help", "--help=all"))

_END = """\
Help:
  baton COMMAND --help      the main flags of a command; --help=all prints all of them
  baton --version           this version (also -v)

Example:
  baton serve                           serves the demo model over HTTP and gRPC
  baton complete "Return a list of"     a completion by that server, from another terminal

Every flag of a command is also an environment variable, BATON_<FLAG>, and a key of the YAML file
that --config names.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the console script; returns the exit status."""
    # OpenMP reads this when torch is loaded. Idle threads that spin would take cores from others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "_ARGCOMPLETE" in os.environ:
        from baton.cli.completion import complete

        complete(build_parser)
    arguments = sys.argv[1:] if argv is None else argv
    command = _find_command(arguments)
    try:
        if not _HELP.intersection(arguments):
            check_command(command)  # before imports that take much memory
        args = build_parser(command).parse_args([command, *arguments[1:]])
        run: Callable[[argparse.Namespace], int | None] = args.run
        status = run(args) or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        discard_unread_output()
        return _EXIT_BROKEN_PIPE
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("baton", *PACKAGES):
            raise
        if os.environ.get("BATON_LOG_LEVEL") == "debug":
            traceback.print_exc()
        sys.stderr.write(f"baton {command}: error: {_text_of_missing(error.name)}\n")
        return _EXIT_FAILURE
    except BatonError as error:
        sys.stderr.write(f"baton {command}: error: {error.message}\n")
        return _EXIT_USAGE if isinstance(error, ConfigurationError) else _EXIT_FAILURE


def _text_of_missing(module: str) -> str:
    """The message about a module that is not found. An installed package may lack it; the parts of
    a namespace such as `google` are packages of their own.
    """
    package = module.rpartition(".")[0]
    if package and _is_installed(package):
        problem = f"the installed package {package} has no module {module}"
    else:
        problem = f"{module} is not installed"
    return (
        f"{problem}; `baton doctor` names all that is missing or has a wrong version, and "
        "BATON_LOG_LEVEL=debug shows what imports it"
    )


def _is_installed(package: str) -> bool:
    """Whether a package is there, and no namespace. To find one, Python imports the packages that
    contain it, which may fail again for the same missing module.
    """
    try:
        spec = find_spec(package)
    except Exception:  # not only ImportError: some packages cannot be imported twice
        return True
    return spec is not None and spec.origin is not None


def _find_command(arguments: list[str]) -> str:
    """Returns the command's name, empty for a flag of `baton` itself; exits if it is unknown."""
    word = _EARLIER_NAMES.get(arguments[0], arguments[0]) if arguments else ""
    if word.startswith("-") or word in COMMANDS:
        return word
    nearest = difflib.get_close_matches(word, COMMANDS, n=1)
    suggestion = f"did you mean {nearest[0]}?" if nearest else "see baton --help"
    problem = f"unknown command {word!r}" if arguments else "no command"
    sys.stderr.write(f"baton: error: {problem}; {suggestion}\n")
    sys.exit(_EXIT_USAGE)


class _BatonParser(FlagParser):
    """The parser of `baton` itself, whose help lists the commands in groups."""

    @override
    def format_help(self) -> str:
        """Returns the help page."""
        lines = ["usage: baton COMMAND [flags]", "", _DESCRIPTION]
        for group in dict.fromkeys(command.group for command in COMMANDS.values()):
            lines += ["", f"{group}:"]
            lines += [
                f"  {name:<12}{command.help}"
                for name, command in COMMANDS.items()
                if command.group == group
            ]
        return "\n".join([*lines, "", _END])


def build_parser(command: str) -> FlagParser:
    """Builds the parser with the flags of `command` only; other commands are not imported."""
    parser = _BatonParser(prog="baton")
    version = f"baton {baton.__version__}"
    parser.add_argument("-v", "--version", action="version", version=version)
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=FlagParser
    )
    for name, entry in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=entry.help, description=entry.help)
        if name == command:
            module = import_module(entry.module)
            subparser.fill(module.main, module.add_args)
            subparser.set_defaults(run=module.main)
    return parser
