"""`HttpConfig`: the address and the limits of the HTTP server."""

from dataclasses import dataclass

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag
from baton.common.flags.values import byte_size
from rpc.server_config import check_port

__all__ = ["HttpConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The HTTP server's address and limits.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 chooses a free one, None is no server.
        port_file: file to which the server writes its port once it listens; None for no file.
        keepalive_interval_s: a stream that is silent for this long gets a comment.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    host: str = "127.0.0.1"
    port: int | None = 0
    port_file: str | None = None
    keepalive_interval_s: float = 15.0
    uds: str | None = flag(
        None,
        "path of a unix socket on which HTTP is served in place of --port; its owner and group may "
        "connect",
        metavar="PATH",
    )
    batch_folder: str | None = flag(
        None,
        "folder in which OpenAI's files and batches (/v1/files, /v1/batches) are kept; routers may "
        "share it (default: there are none)",
        metavar="PATH",
    )
    allowed_origins: tuple[str, ...] = flag(
        (), "origins of web pages whose scripts may call the HTTP server, or *", metavar="ORIGIN"
    )
    allowed_methods: tuple[str, ...] = flag(("*",), "the methods that these scripts may use")
    allowed_headers: tuple[str, ...] = flag(("*",), "the headers that these scripts may send")
    allow_credentials: bool = flag(False, "let these scripts send cookies")
    page: bool = flag(
        True,
        "answer browsers at / with a page on which to talk to the models and to see the state of "
        "the cluster",
    )
    max_request_bytes: int = flag(16 * 2**20, "most bytes of a request's body", parse=byte_size)
    max_connections: int = flag(8192, "most open HTTP connections; further ones are closed at once")
    header_timeout_s: float = flag(
        10.0, "longest time in which the headers of a request arrive", metavar="SECONDS"
    )
    body_timeout_s: float = flag(
        60.0, "longest time in which the body of a request arrives", metavar="SECONDS"
    )
    keep_alive_timeout_s: float = flag(
        90.0,
        "how long a connection without a request stays open; longer than a load balancer in front "
        "keeps it (60 to 75 s with most), or it sends requests on connections that just closed",
        metavar="SECONDS",
    )
    send_timeout_s: float = flag(
        300.0,
        "a client that does not read its answer for so long is cut off, over HTTP and gRPC",
        metavar="SECONDS",
    )
    max_connection_age_s: float | None = flag(
        3600.0,
        "age at which a client is told to go on with a new connection, over HTTP and gRPC, so that "
        "it meets routers that were added; none is no limit",
        metavar="SECONDS",
    )
    max_connection_age_grace_s: float | None = flag(
        None,
        "how long calls on a gRPC connection of that age may go on (default: --default-timeout-s)",
        metavar="SECONDS",
    )

    @property
    def is_on(self) -> bool:
        """Whether there is a server."""
        return self.port is not None or self.uds is not None

    def __post_init__(self) -> None:
        check_port("--port", self.port)
        if self.uds is not None:
            self._check_socket(self.uds)
        folder = self.batch_folder
        if folder is not None and (not folder or "\0" in folder or not self.is_on):
            raise ConfigurationError(
                f"--batch-folder is {folder!r}; it must be a path, and needs HTTP"
            )
        for name in (
            "max_request_bytes",
            "max_connections",
            "header_timeout_s",
            "body_timeout_s",
            "keep_alive_timeout_s",
            "send_timeout_s",
            "max_connection_age_s",
            "max_connection_age_grace_s",
            "keepalive_interval_s",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                flag_name = name.replace("_", "-")
                raise ConfigurationError(f"--{flag_name} is {value!r}; it must be > 0")

    def _check_socket(self, path: str) -> None:
        if not path or "\0" in path:
            raise ConfigurationError(f"--uds is {path!r}; it must be a path")
        if self.port is not None:
            raise ConfigurationError(f"--uds is {path}, and --port is {self.port}; set one of them")
        if self.port_file is not None:
            raise ConfigurationError("--port-file is set, but a socket of --uds has no port")
