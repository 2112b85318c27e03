"""Client channels with Baton's options.

Only the idempotent calls listed here are retried by the channel. `Prefill`
is not among them although it is idempotent: the router answers its failure
by asking another replica, at once.

Limits and keepalive that servers and channels must agree on.
"""

import json

import grpc

__all__ = [
    "CHANNEL_OPTIONS",
    "CLIENT_OPTIONS",
    "MAX_MESSAGE_BYTES",
    "RETRIED_METHODS",
    "SERVER_OPTIONS",
    "open_channel",
]

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


RETRIED_METHODS = (
    ("baton.v1.WorkerService", "GetInfo"),
    ("baton.v1.WorkerService", "GetLoad"),
    ("baton.v1.WorkerService", "Abort"),
    ("baton.v1.PrefillService", "ReleaseHandoff"),
    ("baton.v1.GenerationService", "GetModel"),
    ("baton.v1.GenerationService", "Tokenize"),
    ("baton.v1.GenerationService", "Detokenize"),
)

_RETRY_POLICY = {
    "maxAttempts": 3,
    "initialBackoff": "0.05s",
    "maxBackoff": "0.5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def _service_config() -> str:
    names = [{"service": service, "method": method} for service, method in RETRIED_METHODS]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}]})


CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    *CLIENT_OPTIONS,
    ("grpc.service_config", _service_config()),
)
"""For channels that `open_channel` does not open, say those of synchronous clients."""


def open_channel(target: str) -> grpc.aio.Channel:
    """Opens a plaintext channel; it connects when first used.

    Args:
        target: `host:port`, or any other gRPC target, say `unix:/run/baton.sock`.
    """
    return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
