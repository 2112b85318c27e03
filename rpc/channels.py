"""Client channels with Baton's options.

Only the idempotent calls listed here are retried by the channel. `Prefill`
is not among them although it is idempotent: the router answers its failure
by asking another replica, at once.
"""

import json

import grpc

from rpc.options import CLIENT_OPTIONS

__all__ = ["CHANNEL_OPTIONS", "RETRIED_METHODS", "open_channel"]

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
