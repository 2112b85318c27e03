"""`ServerConfig` and `MetricsConfig`: the flags of a server's address, log, stop and metrics."""

from dataclasses import dataclass

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag

__all__ = ["MetricsConfig", "ServerConfig", "check_port"]

_LOG_LEVELS = ("debug", "info", "warning", "error")
_LOG_FORMATS = ("text", "json")


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
    shutdown_delay_s: float = flag(
        0.0,
        "time after SIGTERM in which the process serves on, while health and /ready already say "
        "that it does not, so that load balancers send new requests elsewhere before it drains",
        metavar="SECONDS",
    )
    log_level: str = flag("info", "log level", choices=_LOG_LEVELS, is_main=True)
    log_format: str = flag(
        "text", "form of log lines; JSON lines have their fields as keys", choices=_LOG_FORMATS
    )

    def __post_init__(self) -> None:
        check_port("--port", self.port)
        _check_duration("--drain-timeout-s", self.drain_timeout_s)
        _check_duration("--shutdown-delay-s", self.shutdown_delay_s)


def _check_duration(flag_name: str, duration_s: float) -> None:
    if not duration_s >= 0:
        raise ConfigurationError(f"{flag_name} is {duration_s}; it must be >= 0")


def check_port(flag_name: str, port: int | None) -> None:
    """Refuses what is no port; None is a server that is off.

    Raises:
        ConfigurationError: names the flag and the port.
    """
    if port is not None and not 0 <= port < 2**16:
        raise ConfigurationError(f"{flag_name} is {port}; it must be in [0, 65536)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """The flags of a process's metrics.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    host: str = flag("127.0.0.1", "address for metrics", name="metrics-host", metavar="HOST")
    port: int | None = flag(
        None,
        "serve Prometheus metrics on this port; 0 picks a free one (default: no metrics)",
        name="metrics-port",
        metavar="PORT",
    )
    metrics_token_file: str | None = flag(
        None,
        "file with the token that readers of the metrics send as a bearer token (default: the "
        "cluster's token, if there is one)",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port < 2**16:
            raise ConfigurationError(f"--metrics-port is {self.port}; it must be in [0, 65536)")
