"""`Fleet`: both tiers, and the check that all their replicas agree."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from baton.common.errors import FailedPreconditionError, Reason, UnavailableError
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2
from router.config.served_model import ServedModelConfig
from router.fleet.capacity import Capacity
from router.fleet.replica import Replica, ReplicaT
from router.fleet.replica_load import ReplicaLoads
from router.fleet.roles import tier_name
from router.fleet.served_model import RequestLimits, ServedModel, StoreAgreement, check_tokenizer
from router.fleet.tier import Tier
from router.fleet.tier_replicas import DecodeReplica, PrefillReplica
from router.fleet.waiting import Turn, WaitingRequests, waited
from router.observe.metrics import CacheCounts
from router.routing.cache_index import CacheIndex
from rpc.discovery.announced import MODEL_LABEL, ROLE_LABEL
from rpc.discovery.announcements import Announcements
from rpc.discovery.discovery import Discovery
from rpc.discovery.source import Scope

__all__ = ["RETRY_AFTER_S", "Fleet", "none_ready"]

_NONE_READY = "no decode replica is ready"
RETRY_AFTER_S = 5.0
"""When a client may try again that no replica could serve: workers start in about this time."""

_CALL_TIMEOUT_S = 5.0
_WATCH_INTERVAL_S = 0.1


def none_ready(how_long: str = "") -> UnavailableError:
    """The error of a request for which there is no decode replica.

    Args:
        how_long: follows the text; how long the request waited for one.
    """
    return UnavailableError(
        f"{_NONE_READY}{how_long}", RETRY_AFTER_S, reason=Reason.NO_REPLICA_READY
    )


class Fleet:
    """The replicas that this router works with.

    All replicas must agree with the decode replica that connected first. When no decode
    replica is connected any more, the next one may differ, so that a cluster can be
    replaced. A prefill replica never keeps a decode replica out: one that connected
    first and differs is dropped.

    Args:
        config: names the model and its targets.
        index: learns what the replicas' prefix caches hold.
        dns_interval_s: seconds between two look-ups of `dns:///` targets.
        security: what this router shows to replicas, and asks of them.
        tokenizer_digest: of the router's own tokenizer; empty if it cannot be compared.
        no_prefill_policy: one of `NO_PREFILL_POLICIES`.
        announcements: workers that announced themselves to this router; None without its gRPC port.

    Attributes:
        waiting: the requests that wait for a replica.
        num_seats: how many sequences the decode replicas run at the same time.
        stores: whether both tiers have a common KV store.

    Raises:
        ConfigurationError: a target is malformed.
    """

    def __init__(
        self,
        config: ServedModelConfig,
        index: CacheIndex,
        dns_interval_s: float,
        security: ClusterSecurity,
        tokenizer_digest: str = "",
        no_prefill_policy: str = "local",
        announcements: Announcements | None = None,
    ) -> None:
        self._no_prefill_policy = no_prefill_policy
        self._tokenizer_digest = tokenizer_digest
        self._model_name = config.names[0]
        self._has_prefill_targets = bool(config.prefill)
        self._security = security
        self.waiting = WaitingRequests()
        self.num_seats = 0
        self.stores = StoreAgreement(self._model_name)
        self._changed = asyncio.Event()
        self._changing_role = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._index = index
        self._loads = ReplicaLoads()

        def discovery(targets: Sequence[str], replica: type[Replica]) -> Discovery:
            labels = {MODEL_LABEL: self._model_name, ROLE_LABEL: tier_name(replica.tier)}
            return Discovery(targets, dns_interval_s, Scope(announcements, labels))

        prefill = discovery(config.prefill, PrefillReplica)
        decode = discovery(config.decode, DecodeReplica)
        self._discoveries = prefill, decode
        self.prefill = self._make_tier(
            prefill, decode, PrefillReplica, lambda address: self.decode.at(address)
        )
        self.decode = self._make_tier(decode, prefill, DecodeReplica, self.prefill.at)
        self._seen_capacities = self._capacities()
        self._serving: Sequence[DecodeReplica] = ()  # those that `_served` was made of
        self._served: tuple[ServedModel, RequestLimits] | None = None

    def start(self) -> None:
        """Begins to look for replicas."""
        activities = self.prefill.run(), self.decode.run(), self._watch_silence()
        self._tasks = [asyncio.create_task(activity) for activity in activities]
        self._tasks += [asyncio.create_task(discovery.run()) for discovery in self._discoveries]

    async def close(self) -> None:
        """Disconnects all replicas. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def model_name(self) -> str:
        """The model's own name."""
        return self._model_name

    @property
    def can_serve(self) -> bool:
        """Whether a request could be served, whatever its prompt: one decode replica suffices,
        unless the policy keeps prompts from decode.
        """
        has_prefill = self.no_prefill_policy == "local" or bool(self.prefill.candidates)
        return has_prefill and bool(self.decode.candidates)

    @property
    def no_prefill_policy(self) -> str:
        """The treatment of prompts that no prefill replica computes: one of `NO_PREFILL_POLICIES`.
        It is local in a cluster without a prefill tier, not even one of replicas that are lost.
        """
        has_tier = self._has_prefill_targets or bool(self.prefill.candidates)
        return self._no_prefill_policy if has_tier else "local"

    @property
    def may_start_prompts(self) -> bool:
        """Whether a prompt would soon be computed, and not only wait: a prefill replica has few, or
        there is none.
        """
        candidates = self.prefill.candidates
        return not candidates or any(replica.has_space for replica in candidates)

    @property
    def full_step_s(self) -> float:
        """Seconds in which each sequence of the slowest decode replica gets a token while all its
        seats are taken; 0 while none has said so.
        """
        return max((r.load.decode_step_s for r in self.decode.candidates), default=0.0)

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
        served = self.served()
        if served is None:
            raise none_ready()
        return served

    async def wait_for_model(
        self, priority: int, deadline: float, timeout_s: float
    ) -> tuple[ServedModel, RequestLimits]:
        """Like `require_model`, but waits for a decode replica.

        Args:
            priority: the request's.
            deadline: `time.monotonic()` at which it must have ended.
            timeout_s: how long it may wait.

        Raises:
            UnavailableError: no decode replica became ready in time.
        """
        turn = Turn(is_new=True, priority=priority, deadline=deadline)
        served = await self.waiting.wait(self.served, turn, timeout_s, lambda: "a model")
        if served is None:
            raise none_ready(f"; {waited(timeout_s)}")
        return served

    def served(self) -> tuple[ServedModel, RequestLimits] | None:
        """The served model and the limits of the decode replicas; None if none takes requests."""
        candidates = self.decode.candidates
        if candidates != self._serving:  # each request asks
            self._serving = candidates
            self._served = _served_by(candidates)
        return self._served

    async def wait_for_change(self) -> None:
        """Returns when a replica has started or stopped taking requests, or has room again."""
        await self._changed.wait()

    def find(self, name: str) -> Replica | None:
        """Returns the connected replica with an address or a worker id."""
        found = (r for r in self._connected() if name in (r.address, r.replica_id))
        return next(found, None)

    async def change_role(self, replica: Replica, role: "worker_pb2.WorkerRole.ValueType") -> None:
        """Changes the tier of a connected replica; returns once its worker has changed.

        Raises:
            FailedPreconditionError: no other replica would take decode requests, or the worker
                cannot have this role.
            BatonError: the worker refused the role, or did not answer.
        """
        async with self._changing_role:  # two changes at a time could leave no decode replica
            others = [r for r in self.decode.candidates if r.replica_id != replica.replica_id]
            if role == PrefillReplica.tier and not others:
                raise FailedPreconditionError(f"{_NONE_READY} besides {replica.address}")
            await replica.worker.change_role(role, _CALL_TIMEOUT_S)
            for each in self._connected():
                if each.replica_id == replica.replica_id:
                    each.note_role(role)

    def cache_counts(self) -> Iterator[CacheCounts]:
        """Yields what is known of the replicas' prefix caches. Any thread may iterate."""
        for replica in self._connected():
            cache = replica.kv_events.cache
            if cache is not None:
                yield CacheCounts(
                    self._model_name,
                    replica.tier_name,
                    replica.address,
                    believed=cache.num_stored,
                    held=replica.load.num_cached_blocks,
                    lacks_events=not cache.has_events,
                    staleness_s=replica.kv_events.staleness_s,
                )

    async def _watch_silence(self) -> None:
        """Looks for silent workers, without end. One timer serves all of them, so that a router
        with hundreds of replicas is idle without requests.
        """
        clock = asyncio.get_running_loop().time
        while True:
            before = clock()
            await asyncio.sleep(_WATCH_INTERVAL_S)
            late_s = max(clock() - before - _WATCH_INTERVAL_S, 0.0)
            for replica in self._connected():
                replica.check_silence(late_s)

    def _notify(self) -> None:
        """Wakes all waiting tasks. Each change has an event of its own, so no task misses one."""
        self._drop_strangers()
        self.num_seats = sum(replica.info.max_num_seqs for replica in self.decode.candidates)
        self.stores.check(self.prefill.candidates, self.decode.candidates)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if (capacities := self._capacities()) != self._seen_capacities:
            self._seen_capacities = capacities
            self.waiting.regroup()
        self.waiting.offer()
        for replica in self.decode.connected:
            if replica.is_leaving:
                replica.connection.wake()  # its requests may move now

    def _capacities(self) -> tuple[frozenset[Capacity], frozenset[Capacity]]:
        """The capacities of both tiers, on which the needs of waiting requests depend."""
        return self.prefill.capacities, self.decode.capacities

    def _connected(self) -> Sequence[Replica]:
        return [*self.decode.connected, *self.prefill.connected]

    def _make_tier(
        self,
        discovery: Discovery,
        elsewhere: Discovery,
        replica: type[ReplicaT],
        find_elsewhere: Callable[[str], Replica | None],
    ) -> Tier[ReplicaT]:
        return Tier(
            replica.tier,
            discovery,
            elsewhere,
            find_elsewhere,
            partial(replica, index=self._index, loads=self._loads, on_space=self.waiting.offer),
            self._security,
            check=self._check,
            on_change=self._notify,
            on_forget=self._forget,
        )

    def _forget(self, worker_id: str) -> None:
        """Drops what a worker that left an address cached, unless a replica of either tier still is
        that worker, and follows its events.
        """
        if all(replica.replica_id != worker_id for replica in self._connected()):
            self._index.forget(worker_id)

    def _check(self, replica: Replica) -> None:
        """Refuses a replica that must not serve with the others.

        Raises:
            FailedPreconditionError: names the differences.
        """
        info, name = replica.info, self._model_name
        if info.model != name:
            raise FailedPreconditionError(f"it serves model {info.model!r}, this router {name!r}")
        check_tokenizer(info, self._tokenizer_digest)
        is_decode = isinstance(replica, DecodeReplica)
        _check_agreement(replica, self.decode.connected if is_decode else self._connected())

    def _drop_strangers(self) -> None:
        """Drops prefill replicas that differ from a decode replica that connected after them."""
        for replica in self.prefill.connected:
            try:
                _check_agreement(replica, self.decode.connected)
            except FailedPreconditionError as error:
                replica.drop(error)


def _served_by(replicas: Sequence[DecodeReplica]) -> tuple[ServedModel, RequestLimits] | None:
    """The model of decode replicas, which agree with each other, and their limits."""
    if not replicas:
        return None
    model = ServedModel.from_info(replicas[0].info)
    return model, RequestLimits(
        vocab_size=model.vocab_size,
        max_model_len=min(replica.info.max_model_len for replica in replicas),
        max_pool_tokens=max(replica.info.max_pool_tokens for replica in replicas),
        max_candidates=max(replica.info.max_num_seqs for replica in replicas),
    )


def _check_agreement(replica: Replica, others: Sequence[Replica]) -> None:
    """Refuses a replica that differs from the others, which agree with each other."""
    if others:
        info, other = replica.info, others[0].info
        differences = ServedModel.from_info(other).differences(ServedModel.from_info(info))
        if differences and info.version != other.version:
            differences += f"; it is Baton {info.version}, the cluster's is {other.version}"
        if differences:
            raise FailedPreconditionError(differences)
