"""`KvHandoff` on the wire and back. Kept out of `kvstore.handoff`, which is pure."""

from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.v1 import prefill_pb2
from kvstore.block_key import KEY_BYTES
from kvstore.handoff import HANDOFF_FORMAT_VERSION, KvHandoff

__all__ = ["handoff_from_proto", "handoff_to_proto"]

_LONGEST_LEASE_MS = 2**32 - 1  # what the field takes: 49 days


def handoff_to_proto(handoff: KvHandoff) -> prefill_pb2.KvHandoff:
    """The message that tells decode of `handoff`."""
    return prefill_pb2.KvHandoff(
        format_version=handoff.format_version,
        handoff_id=handoff.handoff_id,
        namespace=handoff.namespace,
        block_keys=handoff.block_keys,
        num_tokens=handoff.num_tokens,
        connector=handoff.connector,
        digest_scheme=handoff.digest_scheme,
        lease_ms=min(handoff.lease_ms, _LONGEST_LEASE_MS),
        connector_params=handoff.connector_params,
        kv_form=handoff.kv_form,
    )


def handoff_from_proto(message: prefill_pb2.KvHandoff) -> KvHandoff:
    """The handoff that a message tells of.

    Raises:
        FailedPreconditionError: its format version is not ours; nothing else is read then.
        InvalidArgumentError: a block key has not the length of one.
    """
    if message.format_version != HANDOFF_FORMAT_VERSION:
        raise FailedPreconditionError(
            f"handoff format version: decode has {HANDOFF_FORMAT_VERSION}, "
            f"prefill sent {message.format_version}"
        )
    for key in message.block_keys:
        if len(key) != KEY_BYTES:
            raise InvalidArgumentError.for_field(
                "handoff.block_keys", key.hex()[:64], f"{KEY_BYTES} bytes each"
            )
    return KvHandoff(
        handoff_id=message.handoff_id,
        namespace=message.namespace,
        block_keys=tuple(message.block_keys),
        num_tokens=message.num_tokens,
        connector=message.connector,
        digest_scheme=message.digest_scheme,
        lease_ms=message.lease_ms,
        connector_params=message.connector_params,
        kv_form=message.kv_form,
    )
