"""`StoreAgreement`: notices that prefill and decode replicas have different KV stores."""

import logging
from collections.abc import Sequence
from itertools import product
from typing import Protocol

from baton.v1 import worker_pb2

__all__ = ["StoreAgreement"]

_LOGGER = logging.getLogger("baton.router")


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
