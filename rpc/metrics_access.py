"""`MetricsAccess`: who may read a process's metrics."""

from collections.abc import Callable

from baton.common.security.cluster import ClusterSecurity
from baton.common.security.tokens import carries_token, watched_tokens
from rpc.metrics_config import MetricsConfig

__all__ = ["CHALLENGE", "MetricsAccess"]

CHALLENGE = 'Bearer realm="metrics"'
"""The header `WWW-Authenticate` of a refusal."""


class MetricsAccess:
    """Admits readers of a process's metrics: those with the token of `--metrics-token-file`, or
    without that flag with the cluster's token. Without any token all may read them.

    Args:
        config: names the token's file.
        cluster: has the cluster's token.
        has_clients: whether the process's clients need a key. Then, without any token, the
            metrics cannot be read.

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
