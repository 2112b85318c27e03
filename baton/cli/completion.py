"""`baton completion`: prints the code with which a shell completes `baton`; and completes.

The code runs `baton` with the environment of argcomplete, where `complete` answers.
"""

import argparse
import os
import sys
from collections.abc import Callable

__all__ = ["add_args", "complete", "main"]

_SHELLS = ("bash", "zsh", "fish")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("shell", choices=_SHELLS, help="the shell: bash, zsh or fish")


def main(args: argparse.Namespace) -> int:
    """Prints code that completes commands and flags. For bash or zsh, add
    `eval "$(baton completion bash)"` to ~/.bashrc or ~/.zshrc, after compinit in zsh; for fish, run
    `baton completion fish > ~/.config/fish/completions/baton.fish`.
    """
    from argcomplete.shell_integration import shellcode

    sys.stdout.write(shellcode(["baton"], shell=args.shell) + "\n")
    return 0


def complete(build_parser: Callable[[str], argparse.ArgumentParser]) -> None:
    """Writes the completions that the shell asks for in its environment, and ends the process.

    Args:
        build_parser: returns the parser of `baton` with the flags of one command.
    """
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    parser = build_parser(words[1] if len(words) > 1 else "")
    argcomplete.autocomplete(parser, always_complete_options="long")
