"""`MetricsConfig`: the flags of a process's metrics."""

from dataclasses import dataclass

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag

__all__ = ["MetricsConfig"]


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
