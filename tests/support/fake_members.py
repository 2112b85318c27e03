"""Members of a `multi://` connector; the test decides when and how their jobs end."""

from dataclasses import dataclass, field

from kvstore.connector import KvConnectorScheduler
from kvstore.jobs import (
    ConnectorWork,
    LoadJob,
    LoadResult,
    LookupJob,
    LookupResult,
    SaveJob,
    SaveResult,
    TransferResults,
)
from kvstore.multi.jobs import MultiResults
from kvstore.multi.scheduler import MultiMember, MultiScheduler

__all__ = ["FakeMember", "Members"]

Job = LookupJob | LoadJob | SaveJob


@dataclass
class FakeMember:
    """One member: its scheduler half, and the work that its worker half has received.

    Attributes:
        objects: keys of the blocks that it has.
        pending: jobs without a result.
        held: its save jobs that lend blocks.
        received: all other work, in order, as (field, item).
    """

    name: str
    finds_by_key: bool = True
    carries_handoffs: bool = True
    lease_s: float = 60.0
    objects: set = field(default_factory=set)
    pending: list = field(default_factory=list)
    held: list = field(default_factory=list)
    received: list = field(default_factory=list)
    results: list = field(default_factory=list)
    released: list = field(default_factory=list)
    doubted: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = KvConnectorScheduler(
            self.name,
            lease_s=self.lease_s,
            finds_by_key=self.finds_by_key,
            params=self.name.encode(),
        )

    def start(self, work: ConnectorWork) -> None:
        jobs = (*work.lookups, *work.loads, *work.saves)
        assert all(job.keys for job in jobs), "a job without keys"
        self.pending += jobs
        for name in (
            "cancelled_lookups",
            "cancelled_loads",
            "deletes",
            "kept",
            "dropped",
            "offered",
            "ended",
        ):
            self.received += [(name, item) for item in getattr(work, name)]
        self.objects -= set(work.deletes)
        self.pending = [job for job in self.pending if job.job_id not in work.cancelled_lookups]

    def num_leading(self, keys) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.objects), len(keys))

    def answer(self, job: LookupJob) -> None:
        self.pending.remove(job)
        self.results.append(LookupResult(job.job_id, self.num_leading(job.keys)))

    def end_load(self, job: LoadJob, num_blocks: int, error: str) -> None:
        self.pending.remove(job)
        self.results.append(LoadResult(job.job_id, num_blocks, error))

    def end_save(self, job: SaveJob, *, committed: bool = True, is_held: bool = False) -> None:
        self.pending.remove(job)
        self.objects |= set(job.keys) if committed else set()
        self.held += [job.job_id] if is_held else []
        self.results.append(SaveResult(job.job_id, committed, is_held=is_held))

    def release(self, job_id: int) -> None:
        self.held.remove(job_id)
        self.released.append(job_id)

    def poll(self) -> TransferResults:
        ended, self.results = self.results, []
        released, self.released = self.released, []
        kinds = (LookupResult, LoadResult, SaveResult)
        results = [tuple(result for result in ended if isinstance(result, kind)) for kind in kinds]
        doubted, self.doubted = self.doubted, []
        return TransferResults(*results, released=tuple(released), doubted=tuple(doubted))


class Members:
    """A scheduler half over fake members."""

    def __init__(self, *members: FakeMember) -> None:
        self.members = members
        self.scheduler = MultiScheduler(
            [
                MultiMember(member.scheduler, carries_handoffs=member.carries_handoffs)
                for member in members
            ]
        )

    def start(self) -> None:
        """Gives each member its work, as the worker half does."""
        work = self.scheduler.build_work()
        for member, share in zip(self.members, work.members, strict=True):
            member.start(share)

    def poll(self) -> TransferResults:
        """Returns the results for the engine."""
        every = tuple(member.poll() for member in self.members)
        return self.scheduler.update(MultiResults(members=every))

    def step(self) -> TransferResults:
        results = self.poll()
        self.start()
        return results
