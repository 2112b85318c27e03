"""`KvHandoff`: where a prompt's KV lies, from prefill to decode."""

from dataclasses import dataclass

from baton.errors import FailedPreconditionError
from kvstore.codec import DIGEST_SCHEME

__all__ = ["HANDOFF_FORMAT_VERSION", "KvHandoff", "connector_name"]

HANDOFF_FORMAT_VERSION = 1

_SAME_CONNECTOR = {"rediss": "redis"}
"""Schemes that reach the same objects in another way."""


def connector_name(url: str | None) -> str:
    """What tiers compare of their connectors' URLs; empty without a connector."""
    scheme = (url or "").partition(":")[0].lower()
    return _SAME_CONNECTOR.get(scheme, scheme)


@dataclass(frozen=True, slots=True)
class KvHandoff:
    """The terms under which decode may load a prompt's KV.

    Mirrors `baton.v1.KvHandoff`; see `protos/baton/v1/prefill.proto` for the
    meaning of each field.
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

        Raises:
            FailedPreconditionError: names both sides.
        """
        ours_and_theirs = (
            ("handoff format version", HANDOFF_FORMAT_VERSION, self.format_version),
            ("KV namespace", namespace.hex(), self.namespace.hex()),
            ("KV connector", connector, self.connector),
            ("KV digest scheme", DIGEST_SCHEME, self.digest_scheme),
        )
        for name, ours, theirs in ours_and_theirs:
            if ours != theirs:
                raise FailedPreconditionError(f"{name}: decode has {ours}, prefill sent {theirs}")
