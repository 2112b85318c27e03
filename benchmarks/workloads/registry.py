"""`--workload KIND`: all kinds, their flags, and the workload that parsed flags describe."""

import argparse
from typing import Any

from baton.common.errors import ConfigurationError
from benchmarks.request import Workload
from benchmarks.workloads import sharegpt, synthetic, trace
from benchmarks.workloads.kind import Flag, Kind, refuse_below

__all__ = ["KINDS", "add_workload_args", "workload_from_args"]

KINDS: dict[str, Kind] = {
    "random": synthetic.RANDOM,
    "shared-prefix": synthetic.SHARED_PREFIX,
    "conversation": synthetic.CONVERSATION,
    "long": synthetic.LONG,
    "sharegpt": sharegpt.KIND,
    "trace": trace.KIND,
}


def add_workload_args(parser: argparse.ArgumentParser) -> None:
    """Adds `--workload`, `--seed` and the flags of every kind."""
    group = parser.add_argument_group("workload")
    kinds = "; ".join(f"{name}: {kind.help}" for name, kind in KINDS.items())
    group.add_argument(
        "--workload", choices=KINDS, default="random", help=f"{kinds} (default: %(default)s)"
    )
    group.add_argument(
        "--seed", type=int, default=0, help="seed of all draws (default: %(default)s)"
    )
    for name, users in _flags().items():
        flag = next(iter(users.values()))
        group.add_argument(
            flag.option, dest=name, metavar=flag.metavar, help=f"{flag.help} ({_uses(users)})"
        )


def workload_from_args(args: argparse.Namespace, vocab_size: int) -> Workload:
    """Returns the workload that parsed flags describe. Its token ids are below `vocab_size`.

    Raises:
        ConfigurationError: a value is bad, or a flag is missing or belongs to another kind.
    """
    refuse_below(1, vocab_size=vocab_size)
    kind = KINDS[args.workload]
    own = {flag.name for flag in kind.flags}
    for name, users in _flags().items():
        if name not in own and getattr(args, name) is not None:
            option = next(iter(users.values())).option
            raise ConfigurationError(
                f"{option} is set, but --workload is {args.workload}; it is for {', '.join(users)}"
            )
    values = {flag.name: _value(flag, getattr(args, flag.name)) for flag in kind.flags}
    return kind.build(**values, vocab_size=vocab_size, seed=args.seed)


def _flags() -> dict[str, dict[str, Flag]]:
    """Returns, for each flag's name, the kinds that have it and their versions of it."""
    flags: dict[str, dict[str, Flag]] = {}
    for kind_name, kind in KINDS.items():
        for flag in kind.flags:
            flags.setdefault(flag.name, {})[kind_name] = flag
    return flags


def _uses(users: dict[str, Flag]) -> str:
    """Returns the kinds that have a flag, with their defaults, for its help."""
    return "; ".join(
        f"{kind}: {flag.default}" if flag.default is not None else kind
        for kind, flag in users.items()
    )


def _value(flag: Flag, text: str | None) -> Any:
    typed = flag.default if text is None else text
    if typed is None:
        if flag.is_required:
            raise ConfigurationError(f"{flag.option} is missing; it names a {flag.help}")
        return None
    try:
        return flag.parse(typed)
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag.option}: {error.message}") from error
    except ValueError:
        raise ConfigurationError(f"{flag.option} is {typed!r}; it must be a number") from None
