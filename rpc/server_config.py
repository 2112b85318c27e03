"""`ServerConfig`: the address of a server and how it stops; and its flags."""

import argparse
from dataclasses import dataclass

from baton.errors import ConfigurationError

__all__ = [
    "ServerConfig",
    "add_address_args",
    "add_lifecycle_args",
    "add_server_args",
    "join_host_port",
    "parse_port",
    "server_config_from_args",
]

DEFAULT_DRAIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The address of a server and how it stops.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 chooses a free one, None is no server.
        port_file: file to which the server writes its port, in decimal and in one
            piece, once it listens; None for no file.
        drain_timeout_s: how long running requests may continue after the first
            SIGTERM or SIGINT.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    host: str = "127.0.0.1"
    port: int | None = 0
    port_file: str | None = None
    drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port < 2**16:
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
    add_address_args(add_lifecycle_args(parser), "", "gRPC", default_port)


def add_lifecycle_args(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the flags that all servers of a process share, in a group; returns the group."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on, 0.0.0.0 in containers (default: %(default)s)",
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
    return group


def add_address_args(
    group: argparse._ArgumentGroup, prefix: str, protocol: str, default_port: int
) -> None:
    """Adds the port of one server of a process, and the file to which the port is written."""
    group.add_argument(
        f"--{prefix}port",
        type=parse_port,
        metavar="PORT",
        default=default_port,
        help=f"port of the {protocol} server; 0 picks a free one, none turns it off "
        "(default: %(default)s)",
    )
    group.add_argument(
        f"--{prefix}port-file",
        metavar="PATH",
        help=f"file to which the {protocol} server writes its port when it is listening",
    )


def parse_port(text: str) -> int | None:
    """The port that a flag's text names; None for `none`."""
    return None if text == "none" else int(text)


parse_port.__name__ = "port"  # argparse names the type of a bad value by it


def server_config_from_args(args: argparse.Namespace) -> ServerConfig:
    """Builds the config from flags that `add_server_args` added.

    Raises:
        ConfigurationError: a value is out of range, or the port is none; names the flag.
    """
    if args.port is None:
        raise ConfigurationError("--port is none; a worker is called by gRPC alone")
    return ServerConfig(
        host=args.host,
        port=args.port,
        port_file=args.port_file,
        drain_timeout_s=args.drain_timeout_s,
    )
