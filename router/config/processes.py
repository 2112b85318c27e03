"""`ProcessesConfig`: how many processes a router has."""

from dataclasses import dataclass

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag
from baton.common.flags.values import count

__all__ = ["MAX_PROCESSES", "ProcessesConfig", "check_processes"]

MAX_PROCESSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesConfig:
    """The flag of the number of processes.

    Raises:
        ConfigurationError: the number is out of range; names the flag.
    """

    processes: int = flag(
        1,
        "number of processes that serve at the router's ports; each streams on a core of its own",
        parse=count,
        is_main=True,
    )

    def __post_init__(self) -> None:
        check_processes("--processes", self.processes)


def check_processes(flag_name: str, number: int) -> None:
    """Refuses a number of processes that is out of range.

    Raises:
        ConfigurationError: names the flag and the number.
    """
    if not 1 <= number <= MAX_PROCESSES:
        raise ConfigurationError(f"{flag_name} is {number}; it must be in [1, {MAX_PROCESSES}]")
