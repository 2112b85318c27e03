"""`FlagParser`: the argument parser of every command.

It takes a flag's value from the command line, else from the environment, else from the file of
`--config`, else from the default. It accepts underscores in names, suggests a name for an unknown
flag, reports an error in one line, and prints a short help unless `--help=all` asks for all flags.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from typing_extensions import override

from baton.common.flags.sources import Given, read_environment, read_file

__all__ = ["FlagParser"]

_EXIT_USAGE = 2
_FURTHER_NAMES = re.compile(r"^(--?[\w-]+)(?:/--?[\w-]+)+(?=[ :])")
"""In argparse's errors, all names of a flag; the first one is enough."""
_JSON = "JSON"
"""The metavar of flags that take JSON, which a file may have as YAML."""
_REMOVED = {
    "hedge-prefill-after-s": "it was removed, since it brought no gain: leave it out",
}
"""Flags of earlier versions, without dashes in front, with what to do instead."""
_ON = frozenset({"true", "yes", "on", "1"})
_OFF = frozenset({"false", "no", "off", "0"})


class FlagParser(argparse.ArgumentParser):
    """An argument parser with the project's rules for flags.

    Args:
        options: as for `argparse.ArgumentParser`.

    Attributes:
        is_filled: whether the parser has its command's flags.
    """

    def __init__(self, **options: Any) -> None:
        defaults = {"allow_abbrev": False, "formatter_class": _Formatter}
        super().__init__(**{**defaults, **options, "add_help": False})
        self._shows_all = False
        self.is_filled = False
        self.add_argument(
            "-h", "--help", action=_Help, nargs="?", help="print this page; with =all, all flags"
        )

    @classmethod
    def of_command(
        cls,
        prog: str,
        main: Callable[..., Any],
        add_args: Callable[[argparse.ArgumentParser], None],
    ) -> "FlagParser":
        """Returns the parser of a program that is one command.

        Args:
            prog: how the program is called.
            main: its function, whose docstring describes the program.
            add_args: adds its flags.
        """
        parser = cls(prog=prog)
        parser.fill(main, add_args)
        return parser

    def fill(
        self, main: Callable[..., Any], add_args: Callable[[argparse.ArgumentParser], None]
    ) -> None:
        """Adds a command's description and flags, and `--config` unless it has subcommands."""
        self.description, self.is_filled = main.__doc__, True
        add_args(self)
        if self._subparsers is None:
            self.add_argument(
                "--config",
                metavar="FILE",
                help="YAML file of flags; the command line and the environment win over it",
            )

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; a command's parser refuses unknown flags here, too."""
        args = sys.argv[1:] if args is None else list(args)
        if self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        arguments = [self._with_dashes(argument) for argument in _before_separator(args)]
        named = list(self._named(arguments))
        namespace = argparse.Namespace() if namespace is None else namespace
        self._read_sources(namespace, arguments, {action.dest for action in named})
        return super().parse_known_args([*arguments, *args[len(arguments) :]], namespace)

    def parse_given(self, values: Mapping[str, Given]) -> argparse.Namespace:
        """Parses values that a file has, without a command line and the environment."""
        namespace: argparse.Namespace = super().parse_known_args([])[0]
        self._apply(namespace, self._match_actions(values, self._settable()))
        return namespace

    @override
    def error(self, message: str) -> NoReturn:
        """Writes one line and exits with 2."""
        line = " ".join(message.removeprefix("argument ").split())
        line = _FURTHER_NAMES.sub(r"\1", line)
        self.exit(_EXIT_USAGE, f"{self.prog}: error: {line}\n")

    @override
    def format_usage(self) -> str:
        """Returns the usage in one line, with positional arguments but not with flags."""
        formatter = self._get_formatter()
        positionals = [action for action in self._actions if not action.option_strings]
        formatter.add_usage(None, positionals, [])
        return f"{' '.join(formatter.format_help().split())} [flags]\n"

    @override
    def format_help(self) -> str:
        """Returns the help page with the main flags, or with all of them for `--help=all`."""
        hidden = [] if self._shows_all else [minor for minor in self._actions if _is_minor(minor)]
        texts = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        if hidden:
            formatter.add_text(f"{len(hidden)} more flags: {self.prog} --help=all")
        page = f"{self.format_usage()}\n{formatter.format_help()}"
        for action, text in zip(hidden, texts, strict=True):
            action.help = text
        return page

    def print_all_help(self) -> None:
        """Prints the help page with all flags."""
        self._shows_all = True
        self.print_help()

    def _with_dashes(self, argument: str) -> str:
        """Returns an argument with dashes for underscores in the name of a flag."""
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return argument
        return f"{name.replace('_', '-')}{equals}{value}"

    def _named(self, arguments: Iterable[str]) -> Iterator[argparse.Action]:
        """Yields the flags that the command line has; exits if one is unknown."""
        for argument in arguments:
            name = argument.partition("=")[0]
            if name in self._option_string_actions:
                yield self._option_string_actions[name]
            elif name.startswith("--"):
                known = self._option_string_actions
                self.error(f"unknown flag {name}{self._suggestion(name, known)}")

    def _settable(self) -> dict[str, argparse.Action]:
        """Returns the flags that the environment and the file may set, by name without dashes."""
        return {
            option[2:]: action
            for option, action in self._option_string_actions.items()
            if option.startswith("--")
            and not isinstance(action, _Help)
            and not (action.nargs == 0 and option.startswith("--no-"))
        }

    def _suggestion(self, name: str, known: Mapping[str, argparse.Action]) -> str:
        """Returns the end of an error about an unknown name: the flag that may be meant, or why an
        earlier version's is gone.
        """
        if (reason := _REMOVED.get(name.removeprefix("--"))) is not None:
            return f"; {reason}"
        flags = [flag for flag, action in known.items() if action.help != argparse.SUPPRESS]
        nearest = [flag for flag in flags if flag.startswith(name)]
        nearest = nearest or difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
        return f"; did you mean {nearest[0]}?" if nearest else f"; see {self.prog} --help=all"

    def _read_sources(
        self, namespace: argparse.Namespace, arguments: Sequence[str], named: set[str]
    ) -> None:
        """Sets flags that are not on the command line from the environment and the file."""
        stated = self._given(self._config_path(arguments))
        self._apply(
            namespace, ((action, value) for action, value in stated if action.dest not in named)
        )

    def _apply(
        self, namespace: argparse.Namespace, stated: Iterable[tuple[argparse.Action, Given]]
    ) -> None:
        """Sets flags; the first value of a flag wins."""
        origins: dict[str, str] = {}
        for action, value in stated:
            if action.dest not in origins:
                self._set(namespace, action, value)
                origins[action.dest] = value.origin
        if origins:
            namespace.flag_origins = origins

    def _config_path(self, arguments: Sequence[str]) -> str | None:
        """Returns the path that `--config` or its variable names."""
        if "--config" not in self._option_string_actions:
            return None
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        finder.add_argument("--config", nargs="?")
        path: str | None = finder.parse_known_args(list(arguments))[0].config
        from_environment = read_environment("config")
        return path or (from_environment.texts[0] if from_environment else None)

    def _given(self, config_path: str | None) -> Iterator[tuple[argparse.Action, Given]]:
        """Yields flags with values of the environment, then those with values of the file."""
        names = self._settable()
        for name, action in names.items():
            # An alias may have the name of another command's flag, as --model of `baton chat`.
            is_alias = action.help == argparse.SUPPRESS
            from_environment = None if is_alias else read_environment(name)
            if from_environment is not None:
                yield action, from_environment
        try:
            from_file = {} if config_path is None else read_file(config_path)
        except ValueError as error:
            self.error(str(error))
        names.pop("config", None)
        yield from self._match_actions(from_file, names)

    def _match_actions(
        self, values: Mapping[str, Given], names: Mapping[str, argparse.Action]
    ) -> Iterator[tuple[argparse.Action, Given]]:
        for name, value in values.items():
            if name not in names:
                self.error(f"{value.origin}: unknown flag {name}{self._suggestion(name, names)}")
            yield names[name], value

    def _set(self, namespace: argparse.Namespace, action: argparse.Action, value: Given) -> None:
        """Performs a flag's action as if the command line had it."""
        try:
            action.required = False
            if action.nargs == 0:
                self._switch(namespace, action, value)
            else:
                self._store(namespace, action, value)
        except argparse.ArgumentError as error:
            self.error(f"{error.argument_name} (from {value.origin}): {error.message}")

    def _switch(self, namespace: argparse.Namespace, action: argparse.Action, value: Given) -> None:
        text = value.texts[0].lower() if len(value.texts) == 1 else ""
        if text not in _ON | _OFF:
            raise argparse.ArgumentError(action, f"{','.join(value.texts)!r} is not on or off")
        is_on = text in _ON
        for option in action.option_strings:
            # `--no-NAME` of a pair turns it off; a flag without a pair is on or left out.
            if option.startswith("--no-") != is_on:
                action(self, namespace, [], option)
                return

    def _store(self, namespace: argparse.Namespace, action: argparse.Action, stated: Given) -> None:
        if stated.is_json and action.metavar != _JSON:
            raise argparse.ArgumentError(action, "must be a value or a list of values")
        texts = list(stated.texts)
        if action.nargs is not None and len(texts) == 1:
            texts = [text.strip() for text in texts[0].split(",")]
        values = [self._get_value(action, text) for text in texts]
        for value in values:
            self._check_value(action, value)
        option = action.option_strings[0]
        if action.nargs is not None:
            action(self, namespace, values, option)
            return
        if len(values) > 1 and isinstance(action, argparse._StoreAction):
            raise argparse.ArgumentError(action, "takes one value, not a list")
        for value in values:
            action(self, namespace, value, option)


class _Help(argparse.Action):
    """`--help` and `--help=all`."""

    @override
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Prints the page and exits."""
        if values == "all" and isinstance(parser, FlagParser):
            parser.print_all_help()
        else:
            parser.print_help()
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    """Writes the optional value of `--help` as it must be given."""

    @override
    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, _Help):
            return "-h, --help[=all]"
        return super()._format_action_invocation(action)


def _before_separator(arguments: Sequence[str]) -> Sequence[str]:
    """Returns the arguments before `--`, after which all are positional."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _is_minor(action: argparse.Action) -> bool:
    """Returns whether the short help leaves a flag out."""
    return action.help != argparse.SUPPRESS and not getattr(action, "is_main", True)
