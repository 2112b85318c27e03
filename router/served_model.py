"""`ServedModel`: what all replicas of a cluster must agree on. Pure."""

from dataclasses import dataclass

from baton.v1 import worker_pb2

__all__ = ["ServedModel"]

_SUMMARIES = ("kv_form", "namespace")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as its workers describe it; see `GetInfoResponse`.

    Two workers that differ in any of this could misread each other's KV or
    give one request different tokens, so they never serve together.
    """

    model: str
    kv_dtype: str
    model_fingerprint: str
    layout_version: int
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_connector: str
    kv_form: str
    namespace: bytes

    @classmethod
    def from_info(cls, info: worker_pb2.GetInfoResponse) -> "ServedModel":
        """The part of a worker's description that must agree."""
        return cls(
            model=info.model,
            kv_dtype=info.kv_dtype,
            model_fingerprint=info.model_fingerprint,
            layout_version=info.layout_version,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            eos_token_ids=tuple(info.eos_token_ids),
            kv_connector=info.kv_connector,
            kv_form=info.kv_form,
            namespace=info.namespace,
        )

    def differences(self, other: "ServedModel") -> str:
        """Names each field that differs, with both values; empty if none does.

        What sums others up is named only if nothing before it differs.
        """
        differing = [name for name in self.__slots__ if getattr(self, name) != getattr(other, name)]
        named = [name for name in differing if name not in _SUMMARIES] or differing[:1]
        return "; ".join(
            f"{name} is {_shown(getattr(other, name))}, "
            f"the cluster's is {_shown(getattr(self, name))}"
            for name in named
        )


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
