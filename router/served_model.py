"""`ServedModel`: what all replicas of a cluster must agree on. Pure."""

from dataclasses import dataclass, fields

from baton.v1 import worker_pb2

__all__ = ["ServedModel"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as its workers describe it; see `GetInfoResponse`.

    Two workers that differ in any of this could misread each other's KV or
    give one request different tokens, so they never serve together.
    """

    model: str
    namespace: bytes
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_connector: str

    @classmethod
    def from_info(cls, info: worker_pb2.GetInfoResponse) -> "ServedModel":
        """The part of a worker's description that must agree."""
        return cls(
            model=info.model,
            namespace=info.namespace,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            eos_token_ids=tuple(info.eos_token_ids),
            kv_connector=info.kv_connector,
        )

    def differences(self, other: "ServedModel") -> str:
        """Names each field that differs, with both values; empty if none does."""
        return "; ".join(
            f"{field.name} is {_shown(theirs)}, the cluster's is {_shown(ours)}"
            for field in fields(self)
            if (ours := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        )


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
