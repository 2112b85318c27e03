"""`Fleet`: both tiers, and what all their replicas must agree on."""

import asyncio
from collections.abc import Sequence
from functools import partial

from baton.errors import FailedPreconditionError, UnavailableError
from baton.v1 import worker_pb2
from router.config import RouterConfig
from router.discovery import Discovery
from router.prefix_index import PrefixIndex
from router.replica import DecodeReplica, PrefillReplica, Replica
from router.request import RequestLimits
from router.served_model import ServedModel
from router.tier import MakeReplica, ReplicaT, Tier

__all__ = ["Fleet"]


class Fleet:
    """The replicas this router works with.

    The first decode replica to connect sets what the others must agree on; once
    none is connected, so that a cluster can be replaced, the next one sets it
    anew. Prefill replicas, which no request needs, never keep decode replicas
    out: those that came first and differ are dropped.

    Args:
        config: names the targets.
        prefix_index: told to forget replicas that restart or leave.

    Raises:
        ConfigurationError: a target is malformed.
    """

    def __init__(self, config: RouterConfig, prefix_index: PrefixIndex) -> None:
        self._config = config
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
        """Lets all replicas go. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def can_serve(self) -> bool:
        """Whether a request could be served: one decode replica suffices."""
        return bool(self.decode.candidates)

    @property
    def model(self) -> ServedModel | None:
        """What the connected replicas serve; None while there are none."""
        replicas = self._connected()
        return ServedModel.from_info(replicas[0].info) if replicas else None

    def require_model(self) -> tuple[ServedModel, RequestLimits]:
        """The served model and what the decode replicas can take.

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
        """Each change has an event of its own, which all who wait for it see."""
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
            check=partial(self._check, role),
            on_change=self._notify,
            on_forget=self._prefix_index.forget,
            dns_interval_s=self._config.dns_interval_s,
        )

    def _check(self, role: "worker_pb2.WorkerRole.ValueType", replica: Replica) -> None:
        """Refuses a replica that must not serve with the others.

        Raises:
            FailedPreconditionError: says what differs.
        """
        info, name = replica.info, self._config.model_name
        if info.role != role:
            raise FailedPreconditionError(f"its role is {worker_pb2.WorkerRole.Name(info.role)}")
        if info.model != name:
            raise FailedPreconditionError(f"it serves model {info.model!r}, this router {name!r}")
        is_decode = role == worker_pb2.WORKER_ROLE_DECODE
        _check_agreement(replica, self.decode.connected if is_decode else self._connected())

    def _drop_strangers(self) -> None:
        """Lets prefill replicas go that differ from a decode replica that came after them."""
        for replica in self.prefill.connected:
            try:
                _check_agreement(replica, self.decode.connected)
            except FailedPreconditionError as error:
                replica.drop(error)


def _check_agreement(replica: Replica, others: Sequence[Replica]) -> None:
    """Refuses a replica that differs from others, which agree among themselves."""
    if others:
        model = ServedModel.from_info(others[0].info)
        differences = model.differences(ServedModel.from_info(replica.info))
        if differences:
            raise FailedPreconditionError(differences)
