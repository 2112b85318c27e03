"""`SchedulerParts`: what a scheduler is made of. Pure."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from engine.config import EngineConfig
from engine.groups.group import SequenceGroup
from engine.groups.states import GroupTimes
from engine.kv_cache.manager import KvCacheManager
from engine.kv_cache.spec import spec_of
from engine.kv_cache.state_slots import StateCounts
from engine.kv_transfer.costs import LoadCosts
from engine.kv_transfer.save_policy import SavePolicy
from engine.kv_transfer.transfers import Transfers
from engine.metrics.counts import EngineMetrics
from engine.request import EngineLoad, EngineRequest
from engine.runner import EngineTurns, ModelInfo, NoTurns, StepCosts
from engine.schedule.admission import Admission
from engine.schedule.branches import Branches
from engine.schedule.decode_set import DecodeSet
from engine.schedule.ends import Ends, Handovers
from engine.schedule.guides import GrammarSource, Guides
from engine.schedule.output_maker import OutputMaker
from engine.schedule.outputs import OutputProcessor
from engine.schedule.preemption import Preemption
from engine.schedule.queues import GroupQueues
from engine.schedule.retries import Retries
from engine.schedule.step_times import StepTimes
from engine.speculation.drafts import Drafts
from kvstore.block_key import BlockKeyChain
from kvstore.connector import KvConnectorScheduler
from kvstore.guard.metrics import TransferMetrics

__all__ = ["SchedulerParts"]


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """The parts of one scheduler, which share its requests.

    Attributes:
        config: limits.
        new_group: makes the group of a request that has arrived.
        kv: the KV cache manager.
        transfers: loads, saves and handoffs.
        decoding: the sequences that decode.
        queues: waiting and running groups.
        drafts: draft tokens; None without speculation, or without room for any.
        admission: what runs in a step.
        preemption: frees blocks for what runs.
        retries: requests that are tried alone.
        guides: what may follow sequences.
        ends: ends requests and candidates.
        handovers: hands requests over.
        outputs: processes tokens and loads.
        metrics: counts requests and steps.
        clock: monotonic seconds.
        times: measures steps, and bounds the prompts in them.
        kv_bytes_per_token: bytes of a token's K and V in the pool.
    """

    config: EngineConfig
    new_group: Callable[[EngineRequest], SequenceGroup]
    kv: KvCacheManager
    transfers: Transfers
    decoding: DecodeSet
    queues: GroupQueues
    drafts: Drafts | None
    admission: Admission
    preemption: Preemption
    retries: Retries
    guides: Guides
    ends: Ends
    handovers: Handovers
    outputs: OutputProcessor
    metrics: EngineMetrics
    clock: Callable[[], float]
    times: StepTimes
    kv_bytes_per_token: int

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        info: ModelInfo,
        *,
        num_blocks: int,
        num_host_blocks: int,
        num_slots: int = 0,
        num_host_slots: int = 0,
        costs: StepCosts,
        turns: EngineTurns | None = None,
        namespace: bytes,
        connector: KvConnectorScheduler,
        grammars: GrammarSource,
        clock: Callable[[], float],
        metrics: EngineMetrics | None = None,
        transfer_metrics: TransferMetrics | None = None,
    ) -> Self:
        """Makes the parts.

        Args:
            config: limits.
            info: the model's facts.
            num_blocks: KV blocks in the pool.
            num_host_blocks: KV blocks in the host pool.
            num_slots: slots for states in the pool.
            num_host_slots: slots in the host pool.
            costs: measured costs of computing and swapping, for preemption and loads.
            turns: the engine's turns with others; None if it takes none.
            namespace: digest that block keys are rooted in.
            connector: scheduler half of the KV connector; a null connector if there is none.
            grammars: compiles constraints.
            clock: monotonic seconds.
            metrics: counts requests and steps; None discards them.
            transfer_metrics: counts transfers; None discards them.
        """
        metrics = metrics or EngineMetrics()
        spec = spec_of(config, info)
        kv = KvCacheManager(
            num_blocks,
            spec,
            enable_prefix_caching=config.enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            num_slots=num_slots,
            num_host_slots=num_host_slots,
        )
        transfers = Transfers(
            connector,
            kv,
            block_size=config.transfer_block_size,
            num_units=0 if info.states is None else info.states.units,
            namespace=namespace,
            policy=SavePolicy.of(config, spec, connector),
            timeout_s=config.kv_transfer_timeout_s,
            costs=LoadCosts.of(config, costs),
            metrics=transfer_metrics or TransferMetrics(),
            clock=clock,
        )
        saves = transfers.saves
        decoding = DecodeSet(config.block_size, config.num_lanes)
        branches = Branches(kv, decoding, config.max_running)
        queues = GroupQueues(kv, transfers, branches, metrics)
        runs_again = info.states is not None
        drafts = (
            Drafts(config, costs, metrics, clock, runs_again=runs_again)
            if config.max_drafts >= 1
            else None
        )
        preemption = Preemption(config, kv, queues, transfers, costs)
        admission = Admission(
            config, kv, queues, transfers, branches, decoding, preemption, drafts, clock
        )
        guides = Guides(grammars, info.vocab_size)
        maker = OutputMaker(clock)
        ends = Ends(maker, queues, branches, saves, guides, drafts, metrics, clock)
        turns = turns or NoTurns()
        handovers = Handovers(maker, ends, queues, branches, saves, turns)
        return cls(
            config=config,
            new_group=_GroupMaker(config, info, namespace, clock),
            kv=kv,
            transfers=transfers,
            decoding=decoding,
            queues=queues,
            drafts=drafts,
            admission=admission,
            preemption=preemption,
            retries=Retries(queues, admission, metrics),
            guides=guides,
            ends=ends,
            handovers=handovers,
            outputs=OutputProcessor(
                maker,
                ends,
                handovers,
                queues,
                branches,
                saves,
                guides,
                drafts,
                config.kv_load_failure_policy,
                info.states is not None,
                metrics,
                clock,
            ),
            metrics=metrics,
            clock=clock,
            times=StepTimes(config, costs, clock, turns),
            kv_bytes_per_token=info.kv_bytes_per_token,
        )

    def check(self) -> None:
        """Verifies that every block reference belongs to a sequence, a job or a fence.

        Raises:
            AssertionError: a block leaked or is held twice, which is a bug.
        """
        self.kv.check()
        owned = [block for group in self.queues.groups.values() for block in group.held_blocks()]
        owned += self.transfers.jobs.held_blocks() + self.kv.held_blocks()
        if Counter(owned) != self.kv.pool.references():
            raise AssertionError("reference counts differ from owners")

    def load(self) -> EngineLoad:
        """Returns how busy the engine is."""
        states = StateCounts() if self.kv.states is None else self.kv.states.counts
        num_queued_tokens, token_s = self.queues.num_queued_tokens, self.times.prompt_token_s
        return EngineLoad(
            num_running=self.queues.num_running,
            num_waiting=self.queues.num_waiting + self.guides.num_compiling,
            num_queued_tokens=num_queued_tokens,
            num_free_blocks=self.kv.pool.num_free,
            num_blocks=self.kv.pool.num_blocks,
            prefix_cache_queries=self.kv.num_queries,
            prefix_cache_hits=self.kv.num_hits,
            num_preemptions=self.preemption.num_preemptions,
            num_swapped_blocks=self.kv.num_host_used,
            num_swap_preemptions=self.preemption.num_swap_preemptions,
            num_loading=self.queues.num_loading,
            num_compiling=self.guides.num_compiling,
            num_swapped=self.queues.num_swapped,
            num_cached_blocks=self.kv.pool.num_cached,
            num_slots=self.kv.pool.num_slots,
            num_free_slots=self.kv.pool.num_free_slots,
            num_cached_slots=self.kv.pool.num_cached_slots,
            num_kept_states=states.num_kept,
            num_skipped_states=states.num_skipped,
            num_state_hits=states.num_hits,
            num_state_lost_tokens=states.num_lost_tokens,
            prompt_token_s=token_s,
            decode_step_s=self.times.full_step_s,
            queued_prompt_s=num_queued_tokens * token_s,
            load_bytes_per_s=self.transfers.load_tokens_per_s * self.kv_bytes_per_token,
            newest_kv_event=self.kv.events.newest,
        )


class _GroupMaker:
    """Makes the groups of requests in the order of their arrival."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        namespace: bytes,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._max_model_len = info.max_model_len
        self._namespace = namespace
        self._clock = clock
        self._arrivals = itertools.count()

    def __call__(self, request: EngineRequest) -> SequenceGroup:
        config, now = self._config, self._clock()
        # A level of priority counts as some seconds of waiting, so every request gets its turn.
        rank = now + request.spec.priority * config.priority_ageing_s
        return SequenceGroup(
            request=request,
            order=(rank, next(self._arrivals)),
            keys=BlockKeyChain(
                self._namespace,
                config.transfer_block_size,
                cache_salt=request.spec.cache_salt,
                blocks_per_pool_block=config.block_size // config.transfer_block_size,
            ),
            max_len=min(request.spec.max_total_tokens, self._max_model_len),
            times=GroupTimes(now),
        )
