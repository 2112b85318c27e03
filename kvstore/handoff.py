"""`KvHandoff`: where a prompt's KV lies, from prefill to decode."""

from dataclasses import dataclass

from baton.errors import FailedPreconditionError

__all__ = ["HANDOFF_FORMAT_VERSION", "KvHandoff"]

HANDOFF_FORMAT_VERSION = 1


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
        )
        for name, ours, theirs in ours_and_theirs:
            if ours != theirs:
                raise FailedPreconditionError(f"{name}: decode has {ours}, prefill sent {theirs}")
