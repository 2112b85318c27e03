"""`KvHandoff`: the terms under which decode loads a prompt's KV, and their wire form."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.common.errors import FailedPreconditionError, InvalidArgumentError
from baton.v1 import prefill_pb2
from kvstore.block_key import KEY_BYTES
from kvstore.codec import DIGEST_SCHEME
from kvstore.formats import HANDOFF_FORMAT_VERSION
from kvstore.url import FAULTY_PREFIX, MULTI_SCHEME, split_members

__all__ = [
    "KvHandoff",
    "brief_digest",
    "check_keys",
    "connector_name",
    "handoff_from_proto",
    "handoff_to_proto",
]

# The wire field's limit, 49 days.
_MAX_LEASE_MS = 2**32 - 1

# Schemes that reach the same objects in different ways.
_SAME_CONNECTOR = {
    f"redis{security}{topology}": "redis"
    for security in ("", "s")
    for topology in ("", "+sentinel", "+cluster")
}


def connector_name(url: str | None) -> str:
    """Returns the name of a URL's connector, which both tiers must share; empty without a URL.

    `faulty+` does not change the name. Several connectors are `multi(NAME,NAME)`.
    """
    url = url or ""
    scheme = url.partition(":")[0].lower().removeprefix(FAULTY_PREFIX)
    if scheme == MULTI_SCHEME:
        return f"{MULTI_SCHEME}({','.join(map(connector_name, split_members(url)))})"
    return _SAME_CONNECTOR.get(scheme, scheme)


@dataclass(frozen=True, slots=True)
class KvHandoff:
    """The terms under which decode may load a prompt's KV.

    It mirrors `baton.v1.KvHandoff`; `protos/baton/v1/prefill.proto` describes the fields.
    """

    handoff_id: str
    namespace: bytes
    block_keys: tuple[bytes, ...]
    num_tokens: int
    connector: str
    digest_scheme: str
    lease_ms: int
    connector_params: bytes = b""
    format_version: int = HANDOFF_FORMAT_VERSION

    def check_compatible(self, *, namespace: bytes, connector: str) -> None:
        """Refuses a handoff that this replica could misread.

        Args:
            namespace: this replica's.
            connector: the name of its connector.

        Raises:
            FailedPreconditionError: names both sides.
        """
        if self.namespace != namespace:
            ours, theirs = brief_digest(namespace), brief_digest(self.namespace)
            raise FailedPreconditionError(
                f"KV namespace: this replica has {ours}, the handoff {theirs}"
            )
        ours_and_theirs: tuple[tuple[str, object, object], ...] = (
            ("handoff format version", HANDOFF_FORMAT_VERSION, self.format_version),
            ("KV connector", connector, self.connector),
            ("KV digest scheme", DIGEST_SCHEME, self.digest_scheme),
        )
        for name, expected, sent in ours_and_theirs:
            if expected != sent:
                raise FailedPreconditionError(
                    f"{name}: this replica has {expected}, the handoff {sent}"
                )


def brief_digest(namespace: bytes) -> str:
    """The first 12 hex digits of a namespace, for error texts."""
    return namespace.hex()[:12] or "none"


def handoff_to_proto(handoff: KvHandoff) -> prefill_pb2.KvHandoff:
    """Returns the wire form of a handoff. A lease above the field's limit is cut to it."""
    return prefill_pb2.KvHandoff(
        format_version=handoff.format_version,
        handoff_id=handoff.handoff_id,
        namespace=handoff.namespace,
        block_keys=handoff.block_keys,
        num_tokens=handoff.num_tokens,
        connector=handoff.connector,
        digest_scheme=handoff.digest_scheme,
        lease_ms=min(handoff.lease_ms, _MAX_LEASE_MS),
        connector_params=handoff.connector_params,
    )


def handoff_from_proto(message: prefill_pb2.KvHandoff) -> KvHandoff:
    """Returns the handoff of a message.

    Raises:
        FailedPreconditionError: the message has another format version, so its other fields may
            have other meanings.
        InvalidArgumentError: a block key does not have `KEY_BYTES` bytes.
    """
    if message.format_version != HANDOFF_FORMAT_VERSION:
        raise FailedPreconditionError(
            f"handoff format version: this replica has {HANDOFF_FORMAT_VERSION}, "
            f"the handoff {message.format_version}"
        )
    check_keys("handoff.block_keys", message.block_keys)
    return KvHandoff(
        handoff_id=message.handoff_id,
        namespace=message.namespace,
        block_keys=tuple(message.block_keys),
        num_tokens=message.num_tokens,
        connector=message.connector,
        digest_scheme=message.digest_scheme,
        lease_ms=message.lease_ms,
        connector_params=message.connector_params,
    )


def check_keys(field: str, keys: Iterable[bytes]) -> None:
    """Refuses block keys of a message that are none.

    Raises:
        InvalidArgumentError: a key does not have `KEY_BYTES` bytes; names the field.
    """
    for key in keys:
        if len(key) != KEY_BYTES:
            raise InvalidArgumentError.for_field(field, key.hex()[:64], f"{KEY_BYTES} bytes each")
