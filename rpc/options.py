"""Limits and keepalive that servers and channels must agree on."""

__all__ = ["CLIENT_OPTIONS", "MAX_MESSAGE_BYTES", "SERVER_OPTIONS"]

MAX_MESSAGE_BYTES = 16 * 2**20
"""Holds a prompt of a million tokens and its block keys."""

_KEEPALIVE_TIME_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_LEAST_PING_INTERVAL_MS = 5_000  # below _KEEPALIVE_TIME_MS, else servers hang up on our own pings
_FIRST_RECONNECT_BACKOFF_MS = 100
_MAX_RECONNECT_BACKOFF_MS = 2_000

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a port shared with a stranger
)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_BACKOFF_MS),
    ("grpc.min_reconnect_backoff_ms", _FIRST_RECONNECT_BACKOFF_MS),
    ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
    ("grpc.enable_http_proxy", 0),  # replicas are neighbours; a proxy could not reach them
)
