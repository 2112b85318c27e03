"""`ServerConfig`: the address of a server, how it logs and how it stops."""

from dataclasses import dataclass

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag

__all__ = ["LOG_FORMATS", "LOG_LEVELS", "ServerConfig", "check_port"]

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The flags that every server has: its address, how it logs and how it stops.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    host: str = flag(
        "127.0.0.1",
        "address to listen on; in containers 0.0.0.0 or ::, each of which is all addresses, of "
        "IPv4 and of IPv6",
        metavar="HOST",
        is_main=True,
    )
    port: int | None = flag(
        0, "port to listen on; 0 picks a free one, none is no server", metavar="PORT", is_main=True
    )
    port_file: str | None = flag(
        None, "file to which the server writes its port when it is listening", metavar="PATH"
    )
    drain_timeout_s: float = flag(
        30.0,
        "time for running requests after SIGTERM; SIGINT then ends them",
        metavar="SECONDS",
    )
    log_level: str = flag("info", "log level", choices=LOG_LEVELS, is_main=True)
    log_format: str = flag(
        "text", "form of log lines; JSON lines have their fields as keys", choices=LOG_FORMATS
    )

    def __post_init__(self) -> None:
        check_port("--port", self.port)
        if not self.drain_timeout_s >= 0:
            raise ConfigurationError(
                f"--drain-timeout-s is {self.drain_timeout_s}; it must be >= 0"
            )


def check_port(flag_name: str, port: int | None) -> None:
    """Refuses what is no port; None is a server that is off.

    Raises:
        ConfigurationError: names the flag and the port.
    """
    if port is not None and not 0 <= port < 2**16:
        raise ConfigurationError(f"{flag_name} is {port}; it must be in [0, 65536)")
