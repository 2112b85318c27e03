"""`MetricsConfig`: the flags of a process's metrics. `MetricsAccess`: who may read them."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import ConfigurationError
from baton.flags import flag
from baton.security.cluster import ClusterSecurity
from baton.security.tokens import carries_token, watched_tokens

__all__ = ["CHALLENGE", "MetricsAccess", "MetricsConfig"]

CHALLENGE = 'Bearer realm="metrics"'
"""The header `WWW-Authenticate` of a refusal."""


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


class MetricsAccess:
    """Who may read the metrics of a process: those with the token of `--metrics-token-file`, or
    without that flag with the cluster's token. Without any token all may read them.

    Args:
        config: names the token's file.
        cluster: has the cluster's token.
        has_clients: whether the process's clients need a key. Then, without any token, no one may
            read the metrics.

    Raises:
        ConfigurationError: the file cannot be read, or is bad; names the flag.
    """

    def __init__(
        self, config: MetricsConfig, cluster: ClusterSecurity, *, has_clients: bool = False
    ) -> None:
        self._cluster = cluster
        self._has_clients = has_clients
        self._read_tokens: Callable[[], tuple[str, ...]] | None = None
        if config.metrics_token_file is not None:
            self._read_tokens = watched_tokens("--metrics-token-file", config.metrics_token_file)

    def admits(self, header: str | None) -> bool:
        """Whether a reader with this authorization header may read the metrics."""
        if self._read_tokens is not None:
            return carries_token(header or "", self._read_tokens())
        if self._cluster.has_token:
            return self._cluster.admits_header(header or "")
        return not self._has_clients
