"""The scheduler half over several members: decides which member gets which job. Pure.

- A look-up asks the members that find by key, each for the keys that those before it lack. The
  answer is the sum.
- A load asks the first member. The next one is asked for what does not arrive, whatever the
  reason. A member that did not answer is not asked again for the same load.
- A save goes to all members. If it is for no handoff, it goes to those that find by key. It ends
  when all of them have ended, because until then some may read the blocks. It is committed if a
  member that carries handoffs took all blocks. If processes share any member, the members that
  they do not share carry no handoffs.
- A handoff carries each member's own terms. Leases and deletions go to all members.
"""

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from kvstore.connector import KvConnectorScheduler
from kvstore.handoff import KvHandoff
from kvstore.jobs import ConnectorWork, LoadResult, LookupResult, SaveResult, TransferResults
from kvstore.multi.jobs import (
    MultiResults,
    MultiWork,
    SplitLoad,
    SplitLookup,
    SplitSave,
    pack_params,
    unpack_params,
)
from kvstore.url import MULTI_SCHEME

__all__ = ["MultiMember", "MultiScheduler"]


class MultiMember:
    """A member's scheduler half, and which of our jobs its jobs belong to.

    Attributes:
        scheduler: the half.
        carries_handoffs: whether the reader of a handoff can load what this member saves.
        loads: our jobs by its jobs.
        saves: our jobs by its jobs. A held save stays until the member has released it.
    """

    def __init__(self, scheduler: KvConnectorScheduler, *, carries_handoffs: bool) -> None:
        self.scheduler = scheduler
        self.carries_handoffs = carries_handoffs
        self.loads: dict[int, int] = {}
        self.saves: dict[int, int] = {}


class MultiScheduler(KvConnectorScheduler):
    """Splits each job among members and joins their results.

    Args:
        members: in order of preference.
    """

    def __init__(self, members: Sequence[MultiMember]) -> None:
        self._members = tuple(members)
        self._finders = tuple(
            index for index, member in enumerate(members) if member.scheduler.finds_by_key
        )
        super().__init__(
            f"{MULTI_SCHEME}({','.join(member.scheduler.scheme for member in members)})",
            lease_s=0,  # each handoff gets the members' own
            finds_by_key=bool(self._finders),
        )
        self._carriers = frozenset(
            index for index, member in enumerate(members) if member.carries_handoffs
        )
        self._lookups: dict[int, SplitLookup] = {}
        self._loads: dict[int, SplitLoad] = {}
        self._saves: dict[int, SplitSave] = {}
        # What has ended since the last `update`.
        self._results: list[LookupResult | LoadResult | SaveResult] = []
        self._released: list[int] = []
        self._doubted: list[int] = []

    # Look-ups.

    @override
    def lookup(self, keys: Sequence[bytes]) -> int:
        job_id = next(self._job_ids)
        self._lookups[job_id] = SplitLookup(tuple(keys), self._finders)
        self._advance_lookup(job_id)
        return job_id

    @override
    def num_found(self, job_id: int) -> int | None:
        lookup = self._lookups[job_id]
        return lookup.num_found if lookup.is_answered else None

    @override
    def forget_lookup(self, job_id: int) -> None:
        lookup = self._lookups.pop(job_id)
        for member, job in zip(lookup.members, lookup.jobs, strict=False):
            self._members[member].scheduler.forget_lookup(job)

    def _advance_lookup(self, job_id: int) -> None:
        """Adds the answers that are in, and asks the next member if it is its turn."""
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
                self._results.append(LookupResult(job_id, lookup.num_found, lookup.error))
            else:
                next_asked = self._members[lookup.members[len(lookup.jobs)]].scheduler
                lookup.jobs.append(next_asked.lookup(lookup.keys[lookup.num_found :]))

    # Loads.

    @override
    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], handoff: KvHandoff | None = None
    ) -> int:
        job_id = next(self._job_ids)
        sources = self._finders if handoff is None else tuple(range(len(self._members)))
        self._loads[job_id] = SplitLoad(tuple(keys), tuple(block_ids), handoff, sources)
        self._advance_load(job_id)
        return job_id

    @override
    def cancel_load(self, job_id: int) -> None:
        load = self._loads.get(job_id)
        if load is not None and not load.is_cancelled:
            load.is_cancelled = True
            self._members[load.member].scheduler.cancel_load(load.member_job)

    def _advance_load(self, job_id: int) -> None:
        """Asks the next member for the blocks that have not arrived, or ends the load."""
        load = self._loads[job_id]
        source = load.next_source()
        if source is None:
            self._results.append(load.result(job_id))
            del self._loads[job_id]
            return
        member = self._members[source]
        handoff = load.handoff and self._handoff_of(source, load.handoff)
        rest = slice(load.num_good, None)
        load.member = source
        load.member_job = member.scheduler.load(load.keys[rest], load.block_ids[rest], handoff)
        member.loads[load.member_job] = job_id

    # Saves.

    @override
    def save(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        num_tail_tokens: int = 0,
        *,
        num_found: int = 0,
        lease_id: str = "",
        tail_group: int = 0,
    ) -> int:
        job_id = next(self._job_ids)
        every = tuple(range(len(self._members)))
        takers = every if lease_id else self._finders or every
        self._saves[job_id] = SplitSave(set(takers))
        for index in takers:
            member = self._members[index]
            member_job = member.scheduler.save(
                keys,
                block_ids,
                num_tail_tokens,
                num_found=num_found,
                lease_id=lease_id,
                tail_group=tail_group,
            )
            member.saves[member_job] = job_id
        return job_id

    @override
    def delete(self, keys: Sequence[bytes]) -> None:
        for member in self._members:
            member.scheduler.delete(keys)

    # Handoffs and leases.

    @override
    def make_handoff(
        self,
        handoff_id: str,
        namespace: bytes,
        keys: Sequence[bytes],
        num_tokens: int,
    ) -> KvHandoff:
        """Returns a handoff with all members' terms. Its lease is the shortest of theirs."""
        members = [
            each.scheduler.make_handoff(handoff_id, namespace, keys, num_tokens)
            for each in self._members
        ]
        params = pack_params([(each.lease_ms, each.connector_params) for each in members])
        return replace(
            super().make_handoff(handoff_id, namespace, keys, num_tokens),
            lease_ms=min(each.lease_ms for each in members),
            connector_params=params,
        )

    @override
    def keep(self, handoff: KvHandoff) -> None:
        for index, member in enumerate(self._members):
            member.scheduler.keep(self._handoff_of(index, handoff))

    @override
    def drop(self, handoff_id: str) -> None:
        for member in self._members:
            member.scheduler.drop(handoff_id)

    @override
    def offer(self, lease_id: str) -> None:
        for member in self._members:
            member.scheduler.offer(lease_id)

    @override
    def end_lease(self, lease_id: str) -> None:
        for member in self._members:
            member.scheduler.end_lease(lease_id)

    def _handoff_of(self, index: int, handoff: KvHandoff) -> KvHandoff:
        """Returns a member's own handoff.

        A handoff that carries no terms of members leads to nothing at peers; stores need none.
        """
        every = unpack_params(handoff.connector_params, len(self._members))
        lease_ms, params = every[index] if every else (handoff.lease_ms, b"")
        return replace(
            handoff,
            connector=self._members[index].scheduler.scheme,
            lease_ms=lease_ms,
            connector_params=params,
        )

    # Once per step.

    @override
    def build_work(self) -> ConnectorWork:
        return MultiWork(members=[member.scheduler.build_work() for member in self._members])

    @override
    def update(self, results: TransferResults) -> TransferResults:
        if isinstance(results, MultiResults):
            for index, reported in enumerate(results.members):
                self._process(index, self._members[index].scheduler.update(reported))
        for job_id in list(self._lookups):
            self._advance_lookup(job_id)
        return self._take_results()

    def _process(self, index: int, results: TransferResults) -> None:
        member = self._members[index]
        if errors := {result.job_id: result.error for result in results.lookups if result.error}:
            for lookup in self._lookups.values():
                lookup.note_errors(index, errors)
        for loaded in results.loads:
            job_id = member.loads.pop(loaded.job_id)
            self._loads[job_id].add(loaded)
            self._advance_load(job_id)
        # No other member may load into these blocks. The engine gives such a load up.
        self._doubted += [member.loads[job_id] for job_id in results.doubted]
        for saved in results.saves:
            held = saved.is_held
            job_id = member.saves[saved.job_id] if held else member.saves.pop(saved.job_id)
            self._saves[job_id].add(index, saved)
            self._settle(job_id)
        for released in results.released:
            job_id = member.saves.pop(released)
            self._saves[job_id].release(index)
            self._settle(job_id)

    def _settle(self, job_id: int) -> None:
        """Reports a save that all members have ended, and its release when none holds blocks."""
        save = self._saves[job_id]
        if save.open_members:
            return
        if not save.is_reported:
            save.is_reported = True
            self._results.append(save.result(job_id, self._carriers))
        elif not save.held:
            self._released.append(job_id)
        if not save.held:
            del self._saves[job_id]

    def _take_results(self) -> TransferResults:
        results, self._results = self._results, []
        released, self._released = self._released, []
        doubted, self._doubted = self._doubted, []
        return TransferResults.of(results, released, doubted)
