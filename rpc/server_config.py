"""`ServerConfig`: the address of a server and how it stops; and its flags."""

import argparse
from dataclasses import dataclass

from baton.errors import ConfigurationError

__all__ = ["ServerConfig", "add_server_args", "join_host_port", "server_config_from_args"]

DEFAULT_DRAIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The address of a server and how it stops.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 chooses a free one.
        port_file: file to which the server writes its port, in decimal and in one
            piece, once it listens; None for no file.
        drain_timeout_s: how long running requests may continue after the first
            SIGTERM or SIGINT.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    host: str = "127.0.0.1"
    port: int = 0
    port_file: str | None = None
    drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigurationError(f"--port is {self.port}; it must be in [0, 65536)")
        if not self.drain_timeout_s >= 0:
            raise ConfigurationError(
                f"--drain-timeout-s is {self.drain_timeout_s}; it must be >= 0"
            )


def join_host_port(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def add_server_args(parser: argparse.ArgumentParser, *, default_port: int) -> None:
    """Adds the flags of `ServerConfig`, and --log-level."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on, 0.0.0.0 in containers (default: %(default)s)",
    )
    group.add_argument(
        "--port",
        type=int,
        default=default_port,
        help="port to listen on; 0 picks a free one (default: %(default)s)",
    )
    group.add_argument(
        "--port-file",
        metavar="PATH",
        help="file to which the server writes its port when it is listening",
    )
    group.add_argument(
        "--drain-timeout-s",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_DRAIN_TIMEOUT_S,
        help="time for running requests after SIGTERM; a second signal ends them "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="log level (default: %(default)s)",
    )


def server_config_from_args(args: argparse.Namespace) -> ServerConfig:
    """Builds the config from flags that `add_server_args` added.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """
    return ServerConfig(
        host=args.host,
        port=args.port,
        port_file=args.port_file,
        drain_timeout_s=args.drain_timeout_s,
    )
