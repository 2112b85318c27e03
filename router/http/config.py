"""`HttpConfig`: the limits of the HTTP door."""

from dataclasses import dataclass

from baton.errors import ConfigurationError

__all__ = ["HttpConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The HTTP door's address and limits.

    Attributes:
        host: address to listen on.
        port: 0 takes a free one.
        allowed_origins: origins of browsers' pages that may call the API; none: no CORS.
        allowed_methods: the methods that these pages may use.
        allowed_headers: the headers that these pages may send.
        allow_credentials: whether these pages may send cookies.
        max_request_bytes: the most bytes of a request's body.
        max_connections: the most open connections; further ones are closed at once.
        header_timeout_s: how long a client may take for the headers of a request.
        body_timeout_s: how long a client may take for the body of a request.
        keep_alive_timeout_s: how long a connection without a request stays open.
        keepalive_interval_s: a stream that is silent for this long gets a comment.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_request_bytes: int = 16 * 1024 * 1024
    max_connections: int = 8192
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 30.0
    keepalive_interval_s: float = 15.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"--port is {self.port}; it must be in [0, 65535]")
        for name in (
            "max_request_bytes",
            "max_connections",
            "header_timeout_s",
            "body_timeout_s",
            "keep_alive_timeout_s",
            "keepalive_interval_s",
        ):
            if not getattr(self, name) > 0:
                flag = name.replace("_", "-")
                raise ConfigurationError(f"--{flag} is {getattr(self, name)!r}; it must be > 0")
