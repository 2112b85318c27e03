"""The scheduler half over several members: who is asked for what. Pure.

- A look-up asks the members that find by key, each for what those before it
  lack; the answer is the sum.
- A load takes from the first member that has a block. What does not come, for
  whatever reason, the next is asked for; who did not answer is not asked again.
- A save goes to all, or if no handoff leads to it to those that find by key. Its
  result waits for all of theirs, since until then some may read the blocks. It is
  committed if a member that carries handoffs took all blocks; where processes
  share any member, those that they do not share carry none.
- A handoff carries every member's own terms. Leases and deletions go to all.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from kvstore.codec import DIGEST_SCHEME
from kvstore.connector import (
    ConnectorWork,
    KvConnectorScheduler,
    LoadResult,
    LookupResult,
    SaveResult,
    TransferResults,
)
from kvstore.handoff import KvHandoff
from kvstore.multi.jobs import (
    Load,
    Lookup,
    MultiResults,
    MultiWork,
    Save,
    pack_params,
    unpack_params,
)
from kvstore.url import MULTI_SCHEME

__all__ = ["MultiMember", "MultiScheduler"]


class MultiMember:
    """A member's scheduler half, and whose jobs its jobs are.

    Attributes:
        scheduler: the half.
        carries_handoffs: whether what it saves is loaded where handoffs go.
        loads: our jobs by its jobs.
        saves: our jobs by its jobs, until it has released what it held.
    """

    def __init__(self, scheduler: KvConnectorScheduler, *, carries_handoffs: bool) -> None:
        self.scheduler = scheduler
        self.carries_handoffs = carries_handoffs
        self.loads: dict[int, int] = {}
        self.saves: dict[int, int] = {}


class MultiScheduler(KvConnectorScheduler):
    """See the module.

    Args:
        members: in order of preference.
    """

    def __init__(self, members: Sequence[MultiMember]) -> None:
        self.scheme = f"{MULTI_SCHEME}({','.join(each.scheduler.scheme for each in members)})"
        self._members = tuple(members)
        self._finders = tuple(
            index for index, each in enumerate(members) if each.scheduler.finds_by_key
        )
        self.finds_by_key = bool(self._finders)
        self._carriers = frozenset(
            index for index, each in enumerate(members) if each.carries_handoffs
        )
        self._job_ids = itertools.count()
        self._lookups: dict[int, Lookup] = {}
        self._loads: dict[int, Load] = {}
        self._saves: dict[int, Save] = {}
        self._news: list[LookupResult | LoadResult | SaveResult] = []
        self._released: list[int] = []
        self._doubted: list[int] = []

    # Look-ups.

    def lookup(self, keys: Sequence[bytes]) -> int:
        """See `KvConnectorScheduler.lookup`."""
        job_id = next(self._job_ids)
        self._lookups[job_id] = Lookup(tuple(keys), self._finders)
        self._go_on_looking(job_id)
        return job_id

    def num_found(self, job_id: int) -> int | None:
        """See `KvConnectorScheduler.num_found`."""
        lookup = self._lookups[job_id]
        return lookup.num_found if lookup.is_answered else None

    def forget_lookup(self, job_id: int) -> None:
        """See `KvConnectorScheduler.forget_lookup`."""
        lookup = self._lookups.pop(job_id)
        for member, job in zip(lookup.members, lookup.jobs, strict=False):
            self._members[member].scheduler.forget_lookup(job)

    def _go_on_looking(self, job_id: int) -> None:
        """Takes in answers, and asks the next member, until one has yet to answer."""
        lookup = self._lookups[job_id]
        while not lookup.is_answered:
            if lookup.jobs:
                asked = self._members[lookup.members[len(lookup.jobs) - 1]].scheduler
                num_more = asked.num_found(lookup.jobs[-1])
                if num_more is None:
                    return
                lookup.num_found += num_more
            if lookup.num_found == len(lookup.keys) or len(lookup.jobs) == len(lookup.members):
                lookup.is_answered = True
                self._news.append(LookupResult(job_id, lookup.num_found))
            else:
                next_asked = self._members[lookup.members[len(lookup.jobs)]].scheduler
                lookup.jobs.append(next_asked.lookup(lookup.keys[lookup.num_found :]))

    # Loads.

    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], handoff: KvHandoff | None = None
    ) -> int:
        """See `KvConnectorScheduler.load`."""
        job_id = next(self._job_ids)
        sources = self._finders if handoff is None else tuple(range(len(self._members)))
        self._loads[job_id] = Load(tuple(keys), tuple(block_ids), handoff, sources)
        self._go_on_loading(job_id)
        return job_id

    def cancel_load(self, job_id: int) -> None:
        """See `KvConnectorScheduler.cancel_load`."""
        load = self._loads.get(job_id)
        if load is not None and not load.is_cancelled:
            load.is_cancelled = True
            self._members[load.member].scheduler.cancel_load(load.member_job)

    def _go_on_loading(self, job_id: int) -> None:
        """Asks the next member for what has not come, or ends the load."""
        load = self._loads[job_id]
        source = load.next_source()
        if source is None:
            self._news.append(load.result(job_id))
            del self._loads[job_id]
            return
        member = self._members[source]
        handoff = load.handoff and self._handoff_of(source, load.handoff)
        rest = slice(load.num_good, None)
        load.member = source
        load.member_job = member.scheduler.load(load.keys[rest], load.block_ids[rest], handoff)
        member.loads[load.member_job] = job_id

    # Saves.

    def save(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        num_tail_tokens: int = 0,
        *,
        num_found: int = 0,
        lease_id: str = "",
    ) -> int:
        """See `KvConnectorScheduler.save`."""
        job_id = next(self._job_ids)
        every = tuple(range(len(self._members)))
        takers = every if lease_id else self._finders or every
        self._saves[job_id] = Save(set(takers))
        for index in takers:
            member = self._members[index]
            member_job = member.scheduler.save(
                keys, block_ids, num_tail_tokens, num_found=num_found, lease_id=lease_id
            )
            member.saves[member_job] = job_id
        return job_id

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `KvConnectorScheduler.delete`."""
        for member in self._members:
            member.scheduler.delete(keys)

    # Handoffs and leases.

    def make_handoff(
        self,
        handoff_id: str,
        namespace: bytes,
        keys: Sequence[bytes],
        num_tokens: int,
    ) -> KvHandoff:
        """See `KvConnectorScheduler.make_handoff`. Its lease is the shortest of the members'."""
        members = [
            each.scheduler.make_handoff(handoff_id, namespace, keys, num_tokens)
            for each in self._members
        ]
        return KvHandoff(
            handoff_id=handoff_id,
            namespace=namespace,
            block_keys=tuple(keys),
            num_tokens=num_tokens,
            connector=self.scheme,
            digest_scheme=DIGEST_SCHEME,
            lease_ms=min(each.lease_ms for each in members),
            connector_params=pack_params(
                [(each.lease_ms, each.connector_params) for each in members]
            ),
        )

    def keep(self, handoff: KvHandoff) -> None:
        """See `KvConnectorScheduler.keep`."""
        for index, member in enumerate(self._members):
            member.scheduler.keep(self._handoff_of(index, handoff))

    def drop(self, handoff_id: str) -> None:
        """See `KvConnectorScheduler.drop`."""
        for member in self._members:
            member.scheduler.drop(handoff_id)

    def offer(self, lease_id: str) -> None:
        """See `KvConnectorScheduler.offer`."""
        for member in self._members:
            member.scheduler.offer(lease_id)

    def end_lease(self, lease_id: str) -> None:
        """See `KvConnectorScheduler.end_lease`."""
        for member in self._members:
            member.scheduler.end_lease(lease_id)

    def _handoff_of(self, index: int, handoff: KvHandoff) -> KvHandoff:
        """A member's own handoff. One that says nothing of members is nobody's: stores
        need no terms, and peers do not know it.
        """
        every = unpack_params(handoff.connector_params, len(self._members))
        lease_ms, params = every[index] if every else (handoff.lease_ms, b"")
        return replace(
            handoff,
            connector=self._members[index].scheduler.scheme,
            lease_ms=lease_ms,
            connector_params=params,
        )

    # Between the halves.

    def build_work(self) -> ConnectorWork:
        """See `KvConnectorScheduler.build_work`."""
        return MultiWork(members=tuple(each.scheduler.build_work() for each in self._members))

    def update(self, results: TransferResults) -> TransferResults:
        """See `KvConnectorScheduler.update`."""
        if isinstance(results, MultiResults):
            for index, reported in enumerate(results.members):
                self._take(index, self._members[index].scheduler.update(reported))
        for job_id in list(self._lookups):
            self._go_on_looking(job_id)
        return self._drain()

    def _take(self, index: int, results: TransferResults) -> None:
        member = self._members[index]
        for loaded in results.loads:
            job_id = member.loads.pop(loaded.job_id)
            self._loads[job_id].take(loaded)
            self._go_on_loading(job_id)
        # The blocks are no other member's to load into: the engine gives such a load up.
        self._doubted += [member.loads[job_id] for job_id in results.doubted]
        for saved in results.saves:
            held = saved.is_held
            job_id = member.saves[saved.job_id] if held else member.saves.pop(saved.job_id)
            self._saves[job_id].take(index, saved)
            self._settle(job_id)
        for released in results.released:
            job_id = member.saves.pop(released)
            self._saves[job_id].release(index)
            self._settle(job_id)

    def _settle(self, job_id: int) -> None:
        """Reports a save whose members have all ended, and again when none holds its blocks."""
        save = self._saves[job_id]
        if save.open_members:
            return
        if not save.is_reported:
            save.is_reported = True
            self._news.append(save.result(job_id, self._carriers))
        elif not save.held:
            self._released.append(job_id)
        if not save.held:
            del self._saves[job_id]

    def _drain(self) -> TransferResults:
        news, self._news = self._news, []
        released, self._released = self._released, []
        doubted, self._doubted = self._doubted, []
        return TransferResults(
            tuple(each for each in news if isinstance(each, LookupResult)),
            tuple(each for each in news if isinstance(each, LoadResult)),
            tuple(each for each in news if isinstance(each, SaveResult)),
            tuple(released),
            tuple(doubted),
        )
