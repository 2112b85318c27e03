"""`Fleet`: both tiers, and the check that all their replicas agree."""

import asyncio
from collections.abc import Sequence
from functools import partial

from baton.errors import FailedPreconditionError, UnavailableError
from baton.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2
from router.config import ServedModelConfig
from router.discovery import Discovery
from router.policy import PrefixIndex
from router.replica import DecodeReplica, PrefillReplica, Replica
from router.served_model import RequestLimits, ServedModel
from router.tier import MakeReplica, ReplicaT, Tier

__all__ = ["Fleet"]


class Fleet:
    """The replicas that this router works with.

    All replicas must agree with the decode replica that connected first. When no decode
    replica is connected any more, the next one may differ, so that a cluster can be
    replaced. A prefill replica never keeps a decode replica out: one that connected
    first and differs is dropped.

    Args:
        config: names the model and its targets.
        prefix_index: forgets replicas that restart or leave.
        dns_interval_s: seconds between two look-ups of `dns:///` targets.
        security: what this router shows to replicas, and asks of them.

    Raises:
        ConfigurationError: a target is malformed.
    """

    def __init__(
        self,
        config: ServedModelConfig,
        prefix_index: PrefixIndex,
        dns_interval_s: float,
        security: ClusterSecurity,
    ) -> None:
        self._model_name = config.names[0]
        self._dns_interval_s = dns_interval_s
        self._security = security
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._prefix_index = prefix_index
        self.prefill = self._make_tier(
            "prefill", config.prefill, PrefillReplica, worker_pb2.WORKER_ROLE_PREFILL
        )
        self.decode = self._make_tier(
            "decode", config.decode, DecodeReplica, worker_pb2.WORKER_ROLE_DECODE
        )

    def start(self) -> None:
        """Begins to look for replicas."""
        self._tasks = [asyncio.create_task(tier.run()) for tier in (self.prefill, self.decode)]

    async def close(self) -> None:
        """Disconnects all replicas. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def can_serve(self) -> bool:
        """Whether a request could be served: one decode replica suffices."""
        return bool(self.decode.candidates)

    @property
    def model(self) -> ServedModel | None:
        """The model of the connected replicas; None while there are none."""
        replicas = self._connected()
        return ServedModel.from_info(replicas[0].info) if replicas else None

    def require_model(self) -> tuple[ServedModel, RequestLimits]:
        """The served model and the limits of the decode replicas.

        Raises:
            UnavailableError: no decode replica takes requests.
        """
        model, candidates = self.model, self.decode.candidates
        if model is None or not candidates:
            raise UnavailableError("no decode replica is ready; try again later")
        return model, RequestLimits(
            vocab_size=model.vocab_size,
            max_model_len=min(replica.info.max_model_len for replica in candidates),
            max_pool_tokens=max(replica.info.max_pool_tokens for replica in candidates),
            max_candidates=max(replica.info.max_num_seqs for replica in candidates),
        )

    async def wait_for_change(self) -> None:
        """Returns when a replica has started or stopped taking requests."""
        await self._changed.wait()

    def _notify(self) -> None:
        """Wakes all waiting tasks. Each change has an event of its own, so no task misses one."""
        self._drop_strangers()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _connected(self) -> Sequence[Replica]:
        return [*self.decode.connected, *self.prefill.connected]

    def _make_tier(
        self,
        name: str,
        targets: Sequence[str],
        make_replica: MakeReplica[ReplicaT],
        role: "worker_pb2.WorkerRole.ValueType",
    ) -> Tier[ReplicaT]:
        return Tier(
            name,
            Discovery(targets),
            make_replica,
            self._security,
            check=partial(self._check, role),
            on_change=self._notify,
            on_forget=self._prefix_index.forget,
            dns_interval_s=self._dns_interval_s,
        )

    def _check(self, role: "worker_pb2.WorkerRole.ValueType", replica: Replica) -> None:
        """Refuses a replica that must not serve with the others.

        Raises:
            FailedPreconditionError: names the differences.
        """
        info, name = replica.info, self._model_name
        if info.role != role:
            raise FailedPreconditionError(f"its role is {worker_pb2.WorkerRole.Name(info.role)}")
        if info.model != name:
            raise FailedPreconditionError(f"it serves model {info.model!r}, this router {name!r}")
        is_decode = role == worker_pb2.WORKER_ROLE_DECODE
        _check_agreement(replica, self.decode.connected if is_decode else self._connected())

    def _drop_strangers(self) -> None:
        """Drops prefill replicas that differ from a decode replica that connected after them."""
        for replica in self.prefill.connected:
            try:
                _check_agreement(replica, self.decode.connected)
            except FailedPreconditionError as error:
                replica.drop(error)


def _check_agreement(replica: Replica, others: Sequence[Replica]) -> None:
    """Refuses a replica that differs from the others, which agree with each other."""
    if others:
        model = ServedModel.from_info(others[0].info)
        differences = model.differences(ServedModel.from_info(replica.info))
        if differences:
            raise FailedPreconditionError(differences)
