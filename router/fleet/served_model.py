"""`ServedModel`: the facts that all replicas must agree on. `StoreAgreement`: their KV stores."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from baton.common.errors import FailedPreconditionError
from baton.v1 import worker_pb2

__all__ = ["RequestLimits", "ServedModel", "StoreAgreement", "check_tokenizer"]

_SUMMARIES = ("kv_form", "namespace")
"""Fields that summarize others. The namespace is a digest of them, and the form the same in words,
which other versions may choose. They are reported only if the namespace is the only difference.
"""
_LOGGER = logging.getLogger("baton.router")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as its workers describe it; the fields are those of `GetInfoResponse`.

    Two workers that differ in any field could misread each other's KV or generate
    different tokens for a request, so they never serve together.
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
        """Takes the fields that must agree from a worker's description."""
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
        """Names each field that differs, with both values; empty if no field differs."""
        differing = [name for name in self.__slots__ if getattr(self, name) != getattr(other, name)]
        named = [name for name in differing if name not in _SUMMARIES]
        if not named and "namespace" in differing:
            named = differing[:1]
        return "; ".join(
            f"{name} is {_shown(getattr(other, name))}, "
            f"the cluster's is {_shown(getattr(self, name))}"
            for name in named
        )


def check_tokenizer(info: worker_pb2.GetInfoResponse, digest: str) -> None:
    """Refuses a worker whose model has another tokenizer than the router: it would generate wrong
    text. One without a digest, or of an earlier version, is not compared.

    Args:
        info: the worker's description.
        digest: of the router's tokenizer; empty if it cannot be compared.

    Raises:
        FailedPreconditionError: names both digests.
    """
    if digest and info.tokenizer_digest and digest != info.tokenizer_digest:
        raise FailedPreconditionError(
            f"the digest of its tokenizer's vocabulary is {info.tokenizer_digest}, this router's "
            f"is {digest}; start both with the same model folder"
        )


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The largest request that the connected decode replicas can take.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: the most tokens of a prompt and its completion together.
        max_pool_tokens: tokens of one sequence that the largest KV pool holds.
        max_candidates: sequences that one replica runs at once.
    """

    vocab_size: int
    max_model_len: int
    max_pool_tokens: int
    max_candidates: int

    @property
    def max_total_tokens(self) -> int:
        """The most prompt and generated tokens of one candidate."""
        return min(self.max_model_len, self.max_pool_tokens)


class _Replica(Protocol):
    """The compared attributes of `router.fleet.replica.Replica`."""

    @property
    def address(self) -> str:
        """Its `host:port`."""

    @property
    def replica_id(self) -> str:
        """The worker's id."""

    @property
    def load(self) -> worker_pb2.WorkerLoad:
        """Its last report, which names its stores."""


class StoreAgreement:
    """Warns once while a prefill replica and a decode replica meet in no store.

    Stores of one kind look alike in the handoffs: the databases `/0` and `/1` of a server, two
    names of `shm://`, the `/dev/shm` of two containers. Decode then finds nothing and computes
    every prompt again.

    Args:
        model: the name of the replicas' model.

    Attributes:
        warning: what is wrong; empty if nothing is.
    """

    def __init__(self, model: str) -> None:
        self.warning = ""
        self._model = model

    def check(self, prefill: Sequence[_Replica], decode: Sequence[_Replica]) -> None:
        """Compares the stores of the replicas, as far as they are known."""
        stores = {tuple(replica.load.kv_store_ids) for replica in (*prefill, *decode)}
        # Most often all have the same one, and are not compared pair by pair.
        pairs = product(prefill, decode) if len(stores) > 1 else ()
        apart = next((pair for pair in pairs if _are_apart(*pair)), None)
        before, self.warning = self.warning, "" if apart is None else self._describe(*apart)
        if self.warning and not before:
            _LOGGER.warning("%s", self.warning)
        elif before and not self.warning:
            _LOGGER.info("model %s: all replicas have a common KV store again", self._model)

    def _describe(self, prefill: _Replica, decode: _Replica) -> str:
        return (
            f"prefill and decode of model {self._model} have different KV stores of one kind "
            f"({prefill.address} and {decode.address}), so decode computes again what prefill has "
            "computed; give all workers the same --kv-connector, and containers the same volume or "
            "shared memory (docs/connectors.md#faults)"
        )


def _are_apart(prefill: _Replica, decode: _Replica) -> bool:
    """Whether two workers meet in no store. It is unknown while one does not know its stores."""
    ids, others = prefill.load.kv_store_ids, decode.load.kv_store_ids
    if prefill.replica_id == decode.replica_id or not ids or not others:
        return False
    return set(ids).isdisjoint(others)
