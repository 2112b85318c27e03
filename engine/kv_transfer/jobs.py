"""`JobTable`: all connector jobs of one scheduler, with their blocks and deadlines. Pure.

A job holds a reference on its blocks until its result is in, even if its request ends before. So
a block that is still read or written is never given to another request. Blocks that a save lends
stay referenced until the connector releases them.

A job that does not report within the timeout is given up: its request goes on without it. The
job stays in the table, as bytes may still move.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from engine.groups.group import SequenceGroup
from engine.kv_transfer.blocks import PromptBlock
from engine.kv_transfer.costs import LoadEstimate
from kvstore.handoff import KvHandoff

__all__ = ["BaseLoad", "Job", "JobTable", "Lend", "Load", "Lookup", "Prefetch", "Save"]


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A job of the connector.

    Attributes:
        kind: what it is called in logs and metrics.
        job_id: the connector's number for it.
        block_ids: blocks of the pool that it holds a reference on.
        started_at: clock time at which the worker half received it.
        give_up_at: clock time at which its result is overdue.
        too_slow_at: clock time after which computing would have been better than this load.
    """

    kind: ClassVar[Literal["look-up", "load", "save"]]
    job_id: int
    block_ids: list[int] = field(default_factory=list)
    started_at: float = 0.0
    give_up_at: float = math.inf
    too_slow_at: float = math.inf


@dataclass(slots=True, kw_only=True, eq=False)
class Lookup(Job):
    """A look-up of a waiting request.

    Attributes:
        group: the request.
        num_keys: how many object keys it asks for.
    """

    kind = "look-up"
    group: SequenceGroup
    num_keys: int


@dataclass(slots=True, kw_only=True, eq=False)
class BaseLoad(Job):
    """A job that brings KV into the pool.

    Attributes:
        estimate: the cost model's record of it, until the model has used it.
        is_counted: whether its end is counted in the metrics. A load in doubt is counted at once.
    """

    kind = "load"
    estimate: LoadEstimate | None = None
    is_counted: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Load(BaseLoad):
    """A load of an admitted request.

    Attributes:
        group: the request. It waits for the load while `group.transfer.load_job` names it.
        indices: index of the transfer block in its prompt for each item, ascending.
        num_tokens: tokens whose KV the request has if all items arrive.
    """

    group: SequenceGroup
    indices: list[int]
    num_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class Prefetch(BaseLoad):
    """A load into the prefix cache, for a request that has not come yet.

    Attributes:
        handoff_id: the handoff that the request will come with.
        blocks: the prompt's blocks that it loads; `block_ids` are their places in the pool.
        epoch: the prefix cache's epoch at the start.
        is_stopped: whether the connector was asked to end it early.
    """

    handoff_id: str
    blocks: list[PromptBlock]
    epoch: int
    is_stopped: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Save(Job):
    """A save of a request's blocks.

    Attributes:
        group: the request.
        lease_id: the request's handoff id at the start.
        step: number of the step that computes the blocks; 0 if they are computed. The timeout
            starts when that step is over.
        is_tail: whether it saves the prompt's partial tail.
        keys: keys of the full transfer blocks in it.
    """

    kind = "save"
    group: SequenceGroup
    lease_id: str
    keys: Sequence[bytes] = ()
    step: int = 0
    is_tail: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Lend(Job):
    """A save of blocks of the prefix cache, which another engine has asked for.

    Attributes:
        lease_id: id of the handoff.
        handoff: the terms.
        answer: receives the handoff once it is valid, or None; None after it was called.
        is_stopped: whether this engine has ended the lease early.
    """

    kind = "save"
    lease_id: str
    handoff: KvHandoff
    answer: Callable[[KvHandoff | None], None] | None
    is_stopped: bool = False

    def take_answer(self) -> Callable[[KvHandoff | None], None]:
        """Returns what receives the answer; nothing does any more after the first call."""
        answer, self.answer = self.answer, None
        return answer or _ignore


def _ignore(handoff: KvHandoff | None) -> None:
    """Takes an answer after the first one."""


class JobTable:
    """Open jobs by id, and saves whose blocks are lent.

    Args:
        timeout_s: how long a job may take to report.

    Attributes:
        open: jobs whose result is not in.
        lent: saves whose result is in, and whose blocks other engines may still read.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.open: dict[int, Job] = {}
        self.lent: dict[int, Save | Lend] = {}
        self._unstarted: list[Job] = []
        self._ahead: list[Save] = []  # started, of steps that are not over
        self._ended_step = 0
        self._next_due = math.inf  # lower bound of all deadlines; before it, no step searches

    def add(self, job: Job) -> None:
        """Adds a job that the connector has scheduled."""
        self.open[job.job_id] = job
        self._unstarted.append(job)

    def saves(self) -> Iterator[Save]:
        """Returns all saves of requests, open and lent."""
        yield from (job for job in self._all() if isinstance(job, Save))

    def lends(self) -> Iterator[Lend]:
        """Returns all saves of the prefix cache's blocks, open and lent."""
        yield from (job for job in self._all() if isinstance(job, Lend))

    @property
    def has_open_saves(self) -> bool:
        """Whether a save that was not given up has no result."""
        return any(
            isinstance(job, Save) and job.job_id in job.group.transfer.pending_saves
            for job in self.open.values()
        )

    def held_blocks(self) -> list[int]:
        """Returns one entry per block reference that a job holds."""
        return [block for job in self._all() for block in job.block_ids]

    def _all(self) -> Iterator[Job]:
        yield from self.open.values()
        yield from self.lent.values()

    # Time.

    def start_added(self, now: float) -> None:
        """Marks jobs added since the last call as started: the worker half receives them now."""
        for job in self._unstarted:
            job.started_at = now
            if isinstance(job, Save) and job.step > self._ended_step:
                self._ahead.append(job)
            else:
                self._set_timeout(job, now)
        self._unstarted.clear()

    def step_ended(self, step: int, now: float) -> None:
        """Starts the timeout of saves that waited for a step. Steps end in order."""
        self._ended_step = step
        if self._ahead:
            for job in self._ahead:
                if job.step <= step:
                    self._set_timeout(job, now)
            self._ahead = [job for job in self._ahead if job.step > step]

    def limit_wait(self, job: BaseLoad, too_slow_at: float) -> None:
        """Sets the time after which a load takes too long."""
        job.too_slow_at = too_slow_at
        self._next_due = min(self._next_due, too_slow_at)

    @property
    def next_deadline(self) -> float | None:
        """When `take_due` next returns a job; None if never."""
        self._find_next_due()
        return self._next_due if self._next_due < math.inf else None

    def take_due(self, now: float) -> tuple[list[Job], list[BaseLoad]]:
        """Returns open jobs whose result is overdue, and other loads that take too long.

        A job is returned at most once in each of the two roles.
        """
        if now < self._next_due:
            return [], []
        overdue = [job for job in self.open.values() if job.give_up_at <= now]
        for job in overdue:
            job.give_up_at = job.too_slow_at = math.inf
        too_slow = [
            job
            for job in self.open.values()
            if isinstance(job, BaseLoad) and job.too_slow_at <= now
        ]
        for job in too_slow:
            job.too_slow_at = math.inf
        self._find_next_due()
        return overdue, too_slow

    def _find_next_due(self) -> None:
        times = [min(job.give_up_at, job.too_slow_at) for job in self.open.values()]
        self._next_due = min(times, default=math.inf)

    def _set_timeout(self, job: Job, now: float) -> None:
        job.give_up_at = now + self._timeout_s
        self._next_due = min(self._next_due, job.give_up_at)
