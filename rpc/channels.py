"""Options of gRPC servers and channels, and client channels that have them.

Servers and channels must agree on message limits and keepalive.
"""

import json
from collections.abc import Sequence
from typing import Any

import grpc

__all__ = [
    "CHANNEL_OPTIONS",
    "MAX_MESSAGE_BYTES",
    "MAX_METADATA_BYTES",
    "RETRIED_METHODS",
    "SERVER_OPTIONS",
    "open_blocking_channel",
    "open_channel",
]

MAX_MESSAGE_BYTES = 16 * 2**20
"""Enough for a prompt of a million tokens and its block keys."""
MAX_METADATA_BYTES = 64 * 1024
"""The most bytes of a call's metadata, as of HTTP's headers; each entry counts 32 bytes more. gRPC
refuses calls between a soft and a hard limit at random, so both are this one.
"""

_KEEPALIVE_TIME_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
# Clients of other libraries send pings each second; a server closes connections that send more.
_MIN_PING_INTERVAL_MS = 500
# A channel without a call connects again when it is used.
_MAX_IDLE_MS = 300_000
_HANDSHAKE_TIMEOUT_MS = 10_000
_MAX_PENDING_CALLS = 16_384
_MAX_PENDING_S = 3_600
_FIRST_RECONNECT_BACKOFF_MS = 100
_MAX_RECONNECT_BACKOFF_MS = 2_000

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ("grpc.max_connection_idle_ms", _MAX_IDLE_MS),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
    # Beyond 1,000 calls that the event loop has not seen yet, gRPC cancels some at random, and all
    # beyond 3,000. Servers have limits of their own, whose refusals say when to try again.
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING_CALLS),
    # After 30 s gRPC would cancel those that still wait, before a burst of 10,000 has been taken.
    # The clients' deadlines end them in time.
    ("grpc.server_max_unrequested_time_in_server", _MAX_PENDING_S),
    # A port in use is an error, unless a server states that it shares its port.
    ("grpc.so_reuseport", 0),
)

RETRIED_METHODS = (
    ("baton.v1.WorkerService", "GetInfo"),
    ("baton.v1.WorkerService", "GetLoad"),
    ("baton.v1.WorkerService", "Abort"),
    ("baton.v1.PrefillService", "ReleaseHandoff"),
    ("baton.v1.GenerationService", "GetModel"),
    ("baton.v1.GenerationService", "Tokenize"),
    ("baton.v1.GenerationService", "Detokenize"),
    ("baton.v1.ClusterService", "GetCluster"),
    ("baton.v1.ClusterService", "GetTrace"),
)
"""Idempotent methods that the channel retries. `Prefill` is idempotent too, but when it fails the
router at once asks another replica.
"""

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
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_BACKOFF_MS),
    ("grpc.min_reconnect_backoff_ms", _FIRST_RECONNECT_BACKOFF_MS),
    ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
    ("grpc.enable_http_proxy", 0),  # a proxy could not reach the replicas' addresses
    ("grpc.service_config", _service_config()),
)


def open_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """Opens a channel, which connects when it is first used.

    Args:
        target: `host:port`, or any other gRPC target, for example `unix:/run/baton.sock`.
        credentials: for TLS; None for plain text.
        options: further options.
    """
    every_option = (*CHANNEL_OPTIONS, *options)
    if credentials is None:
        return grpc.aio.insecure_channel(target, every_option)
    return grpc.aio.secure_channel(target, credentials, every_option)


def open_blocking_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.Channel:
    """Opens a channel for threads that wait for answers; the arguments are those of
    `open_channel`.
    """
    every_option = (*CHANNEL_OPTIONS, *options)
    if credentials is None:
        return grpc.insecure_channel(target, every_option)
    return grpc.secure_channel(target, credentials, every_option)
