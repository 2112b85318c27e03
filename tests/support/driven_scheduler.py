"""A scheduler driven step by step, or one step ahead, on the fake model."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from baton.common.errors import InternalError
from engine.batch import ScheduledBatch
from engine.constraints.grammars import Grammars
from engine.request import EngineOutput, EngineRequest
from engine.runner import EngineTurns
from engine.schedule.parts import SchedulerParts
from engine.schedule.scheduler import Scheduler
from kvstore.block_key import BlockKeyChain
from kvstore.connector import KvConnectorScheduler, null_connector
from kvstore.guard.metrics import TransferMetrics
from kvstore.handoff import KvHandoff
from kvstore.jobs import (
    ConnectorWork,
    LoadJob,
    LoadResult,
    LookupResult,
    SaveResult,
    TransferResults,
)
from tests.support.fake_model import fake_config, fake_info
from tests.support.fake_runner import FakeRunner
from tests.support.reference_decoding import progress_of
from tests.support.requests import engine_request

__all__ = ["NAMESPACE", "DrivenScheduler", "handed_over", "request"]

NAMESPACE = b"namespace"


def request(
    request_id: str, num_tokens: int = 6, *, first_token: int = 1, **fields: object
) -> EngineRequest:
    """Returns a request whose prompt is `first_token`, followed by ones."""
    prompt = (first_token, *(1,) * (num_tokens - 1))
    defaults = {"prompt_token_ids": prompt, "max_tokens": 4}
    return engine_request(request_id=request_id, **(defaults | fields))


def handed_over(request_id: str, num_tokens: int = 10, **fields: object) -> EngineRequest:
    """Returns a request that prefill has handed over, with a first token."""
    resumed = request(request_id, num_tokens, **fields)
    keys = BlockKeyChain(NAMESPACE, 4, cache_salt=resumed.spec.cache_salt)
    handoff = KvHandoff(
        handoff_id="h",
        namespace=NAMESPACE,
        block_keys=keys.of_prompt(resumed.spec.prompt_token_ids, "h"),
        num_tokens=num_tokens,
        connector="fake",
        digest_scheme="xxh3-128",
        lease_ms=1000,
    )
    progress = tuple(
        progress_of(resumed, index, (0,)) for index in range(resumed.spec.params.num_candidates)
    )
    return replace(resumed, progress=progress, handoff=handoff)


class DrivenScheduler:
    """A scheduler with blocks of four tokens and sequences of up to 64 tokens.

    Args:
        num_blocks: KV blocks in the pool.
        num_host_blocks: KV blocks in the host pool.
        windows: sliding window of each layer group.
        with_connector: whether it has a connector, whose jobs the test ends.
        finds_by_key: whether the connector is a store; else it lends blocks.
        role: "prefill" hands every request over.
        turns: the engine's turns with others; None if it takes none.
        config: fields of the engine's configuration.

    Attributes:
        now: the scheduler's clock.
        metrics: counts of its transfers.
        shares: tokens per request in the last scheduled step.
    """

    def __init__(
        self,
        num_blocks: int = 32,
        *,
        num_host_blocks: int = 0,
        windows: tuple[int | None, ...] = (None,),
        with_connector: bool = False,
        finds_by_key: bool = True,
        role: str = "both",
        turns: EngineTurns | None = None,
        **config: object,
    ) -> None:
        info = fake_info(4, 64, windows=windows)
        self.now = 0.0
        self.metrics = TransferMetrics()
        self.shares: dict[str, int] = {}
        self._hands_over = role == "prefill"
        self.runner = FakeRunner(info, num_blocks, num_host_blocks=num_host_blocks)
        connector = KvConnectorScheduler("fake", lease_s=60, finds_by_key=finds_by_key)
        engine_config = fake_config(kv_connector="fake://" if with_connector else None, **config)
        parts = SchedulerParts.build(
            engine_config,
            info,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            costs=self.runner.costs,
            namespace=NAMESPACE,
            connector=connector if with_connector else null_connector()[0],
            grammars=Grammars(engine_config, info, lambda: None),
            clock=lambda: self.now,
            transfer_metrics=self.metrics,
            turns=turns,
        )
        self.scheduler = Scheduler(parts)

    @property
    def num_free(self) -> int:
        return self.scheduler.load().num_free_blocks

    def add(self, *requests: EngineRequest) -> list[EngineOutput]:
        added = [replace(added_request, hands_over=self._hands_over) for added_request in requests]
        return [output for added_request in added for output in self.scheduler.add(added_request)]

    def begin(self) -> ScheduledBatch | None:
        """Schedules a step."""
        self.shares = {}
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        record = self.scheduler._in_flight[-1]
        for sequence, chunk in zip(record.chunks, batch.chunks, strict=True):
            self._share(sequence.group.request_id, chunk.num_tokens)
        for sequence in record.decoding:
            self._share(sequence.group.request_id, 1)
        return batch

    def end(self, batch: ScheduledBatch) -> list[EngineOutput]:
        """Executes and commits a step."""
        outputs = self.scheduler.commit(batch, self.runner.execute(batch))
        self.scheduler.check()
        return outputs

    def fail(self, batch: ScheduledBatch) -> list[EngineOutput]:
        """Fails a step, as if its execution had raised."""
        outputs = self.scheduler.fail(batch, InternalError("injected by the test"))
        self.scheduler.check()
        return outputs

    def step(self) -> list[EngineOutput]:
        """Runs a whole step; `shares` has the tokens of each request."""
        batch = self.begin()
        return [] if batch is None else self.end(batch)

    def steps(self, count: int) -> list[EngineOutput]:
        return [output for _ in range(count) for output in self.step()]

    def run(self, max_steps: int = 400) -> dict[str, list[int]]:
        """Runs steps until no request is left; returns tokens of candidate 0 by request."""
        tokens: dict[str, list[int]] = {}
        for _ in range(max_steps):
            if self.scheduler.num_unfinished == 0:
                return tokens
            for output in self.step():
                if output.index == 0:
                    tokens.setdefault(output.request_id, []).extend(output.token_ids)
        raise AssertionError("a request starved")

    # Results that the connector's worker half would report.

    def work(self) -> ConnectorWork:
        return self.scheduler.build_work()

    def answer(self, num_found: int = 0) -> ConnectorWork:
        """Answers all pending look-ups; returns the connector's work."""
        work = self.work()
        lookups = tuple(LookupResult(job.job_id, num_found) for job in work.lookups)
        self.scheduler.apply(TransferResults(lookups=lookups))
        return work

    def end_load(
        self, job: LoadJob, token_ids: Sequence[int], num_blocks: int | None = None, error: str = ""
    ) -> list[EngineOutput]:
        """Ends a load of the first blocks of `token_ids`; the last one may be a partial tail."""
        num_blocks = len(job.block_ids) if num_blocks is None else num_blocks
        for index, block_id in enumerate(job.block_ids[:num_blocks]):
            ends = range(4 * index + 1, min(4 * index + 4, len(token_ids)) + 1)
            slots = [(0, tuple(token_ids[:end])) for end in ends]
            self.runner.kv_pool[block_id][: len(slots)] = slots
        result = LoadResult(job.job_id, num_blocks, error)
        return self.scheduler.apply(TransferResults(loads=(result,)))

    def end_saves(self, job_ids: Iterable[int], *, committed: bool = True) -> list[EngineOutput]:
        results = tuple(SaveResult(job_id, committed) for job_id in job_ids)
        return self.scheduler.apply(TransferResults(saves=results))

    def end_all_saves(self) -> None:
        """Ends the saves that have begun since the last call of `work`."""
        self.end_saves(job.job_id for job in self.work().saves)

    def _share(self, request_id: str, num_tokens: int) -> None:
        self.shares[request_id] = self.shares.get(request_id, 0) + num_tokens
