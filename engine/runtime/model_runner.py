"""`ModelRunner`: executes scheduled batches on a model with a paged KV pool."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import kernels
from engine.batch import ScheduledBatch, StepOutput
from engine.config import EngineConfig
from engine.runner import LayersComputed, ModelInfo, PendingOutput, StepCosts
from engine.runtime.device import current, fetch, wait_for
from engine.runtime.draws.logits_processors import check_extra_args
from engine.runtime.launch.launcher import Launcher
from engine.runtime.rank_batches import BatchSender
from engine.runtime.state_pool import split_pairs
from engine.runtime.steps.steps import LaunchedStep
from engine.step_watch import SLOW_FACTOR
from kernels import EngineRanks, RanksLostError

__all__ = ["ModelRunner"]

# The ranks end first, so that the engine can end them: a frozen one does not end by itself.
_SHARE_OF_STEP_TIMEOUT = 0.8


class ModelRunner:
    """The engine's `Runner`: loads the model, allocates its pools, runs its steps.

    `dtype` "auto" is the checkpoint's type on every device, so that tiers on different
    devices can exchange KV. Most CPUs compute prompts faster in float32 than in
    float16, which needs half the memory.

    Not thread-safe: one thread at a time may call `execute` and `submit`, and not both.

    Args:
        config: the flags.
        progress: whether loading shows a progress bar.
        ranks: all ranks of the engine; this runner computes one's part, and closes them. None for
            one rank. Rank 0 passes its batches on to the others.

    Attributes:
        info: properties of the model.
        num_blocks: number of blocks in the pool.
        num_host_blocks: number of blocks in the host pool.
        num_slots: number of slots for states.
        num_host_slots: number of slots in the host pool.
        costs: measured times that preemption compares.
        turns: the turns in which workers of one machine compute.

    Raises:
        ConfigurationError: a flag or the checkpoint is invalid, or the pool cannot
            hold one request.
    """

    info: ModelInfo
    num_blocks: int
    num_host_blocks: int
    num_slots: int
    num_host_slots: int
    costs: StepCosts

    def __init__(
        self, config: EngineConfig, *, progress: bool = True, ranks: EngineRanks | None = None
    ) -> None:
        launched = Launcher(config, progress=progress, ranks=ranks).launch()
        self.info = launched.info
        self.num_blocks = launched.pools.num_blocks
        self.num_host_blocks = launched.pools.num_host_blocks
        self.num_slots = launched.pools.num_slots
        self.num_host_slots = len(launched.pools.host_slots)
        self.costs = launched.costs
        self._config = config
        self._ranks = ranks
        self._sender = None if ranks is None or ranks.rank else BatchSender(ranks)
        # Other stages compute without turns, and before this one.
        self._sends_early = ranks is not None and ranks.stage > 0
        self._device = launched.device
        self._model = launched.model
        self._processors = launched.processors
        self.turns = launched.turns
        self._kv_pool, self._host_pool = launched.pools.kv, launched.pools.host
        states = launched.pools.states
        self._slots, self._host_slots = (
            None if states is None else states.slots,
            launched.pools.host_slots,
        )
        self._steps = launched.steps
        self._thread: ThreadPoolExecutor | None = None
        self._is_closed = False
        if ranks is not None:
            self._wait_limit_s = config.step_timeout_s * _SHARE_OF_STEP_TIMEOUT
            ranks.limit_waits(self._wait_limit_s)
            # Of the steps that may be in flight in all stages: a wait may be for the oldest one.
            self._recent_tokens = deque([0], ranks.num_stages + 1)

    @property
    def kv_pool(self) -> torch.Tensor:
        """The pool without spare blocks; see `Runner`. One of several ranks has its part of the
        heads.
        """
        return self._kv_pool

    def check_extra_args(self, args: Mapping[str, Any]) -> None:
        """Refuses `extra_args` that no logits processor applies to. Any thread may call it."""
        check_extra_args(self._processors, args)

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Runs one step: table updates, swaps, block copies, forward pass, draws.

        If that is interrupted, it waits for the device, as `_launch` does.
        """
        try:
            if self._sends_early:
                self._pass_on(batch)
            return self._execute(batch)
        except BaseException:
            self._abort_ranks()
            raise

    def submit(self, batch: ScheduledBatch) -> PendingOutput:
        """Submits one step, which runs after those submitted before it.

        A GPU's step is launched in the caller's thread; that of a CPU, or of a pipeline, runs in
        the runner's thread.
        """
        if self._steps.is_asynchronous:
            return self._launch(batch)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "model-runner")
        try:
            if self._sends_early:
                self._pass_on(batch)
            return self._thread.submit(self._execute, batch)
        except BaseException:
            self._abort_ranks()
            raise

    def count_work(self, num_work_messages: Callable[[], int]) -> None:
        """Registers a function whose value rank 0 sends with each batch, as `BatchSender` does."""
        assert self._sender is not None, "only rank 0 sends batches"
        self._sender.num_work_messages = num_work_messages

    def watch_layers(self, on_layers: LayersComputed) -> None:
        """Registers a function that steps on a CPU call as layers are computed."""
        self._steps.watch_layers(on_layers)

    def close(self) -> None:
        """Waits for submitted steps, ends the thread, closes the turns' files, and frees the model
        and the pools. Idempotent.
        """
        if self._thread is not None:
            self._thread.shutdown()
        wait_for(self._device)
        self.turns.close()
        if self._ranks is not None:
            self._ranks.close()
        if not self._is_closed:  # the engine, which the steps refer to, may live for longer
            del self._steps, self._model, self._kv_pool, self._host_pool
            del self._slots, self._host_slots
        self._is_closed = True

    def _execute(self, batch: ScheduledBatch) -> StepOutput:
        """Runs one step, which was sent to the other ranks if stages before this one compute it."""
        try:
            return self._launch(batch).result()
        except BaseException:
            self._abort_ranks()
            wait_for(self._device)
            raise

    def _launch(self, batch: ScheduledBatch) -> PendingOutput:
        """Launches a step.

        If that raises an exception, waits for the device first: the step's blocks may then be
        reused, by loads too, which are not ordered behind the device's stream.
        """
        try:
            with current(self._device):
                return self._launch_on_current_device(batch)
        except BaseException as error:
            self._abort_ranks()  # the device may wait for them
            wait_for(self._device)
            if self._ranks is None:
                raise
            if isinstance(error, RanksLostError) or not isinstance(error, Exception):
                raise
            raise RanksLostError(f"rank {self._ranks.rank} has failed: {error}") from error

    def _launch_on_current_device(self, batch: ScheduledBatch) -> PendingOutput:
        if self._ranks is not None:
            self._limit_waits(batch.num_tokens)
        self._steps.update(batch)
        self._move_blocks(batch)
        if not batch.num_tokens:
            if not self._sends_early:
                self._pass_on(batch)
            copies_done = fetch(self._device, ())
            group = None if self._ranks is None else self._ranks.device_group
            return LaunchedStep(copies_done, lambda _: StepOutput(batch.step), group)
        with self.turns.wait_for_turn():
            if not self._sends_early:
                self._pass_on(batch)  # now, as the other ranks wait for this one's part
            return self._steps.launch(batch)

    def _move_blocks(self, batch: ScheduledBatch) -> None:
        """Swaps and copies the step's blocks, and its slots."""
        host, pool = self.num_host_blocks, self.num_blocks
        swap_ins, slots_in = split_pairs(batch.swap_ins, host, pool)
        swap_outs, slots_out = split_pairs(batch.swap_outs, pool, host)
        block_copies, slot_copies = split_pairs(batch.block_copies, pool, pool)
        kernels.swap_blocks(self._host_pool, self.kv_pool, swap_ins)
        kernels.swap_blocks(self.kv_pool, self._host_pool, swap_outs)
        kernels.copy_blocks(self.kv_pool, block_copies)
        if self._slots is not None:
            kernels.swap_blocks(self._host_slots, self._slots, slots_in)
            kernels.swap_blocks(self._slots, self._host_slots, slots_out)
            kernels.copy_blocks(self._slots, slot_copies)

    def _limit_waits(self, num_tokens: int) -> None:
        """Sets how long a step of so many tokens waits for other ranks: as `StepWatch` does,
        longer for many tokens than `--step-timeout-s`.
        """
        assert self._ranks is not None
        self._recent_tokens.append(num_tokens)
        most, num_stages = max(self._recent_tokens), self._ranks.num_stages
        slow_s = SLOW_FACTOR * num_stages * most * self.costs.prompt_token_s
        limit_s = max(self._config.step_timeout_s * _SHARE_OF_STEP_TIMEOUT, slow_s)
        if limit_s != self._wait_limit_s:
            self._wait_limit_s = limit_s
            self._ranks.limit_waits(limit_s)

    def _pass_on(self, batch: ScheduledBatch) -> None:
        """Sends a batch from rank 0 to the other ranks, if there are any."""
        if self._sender is not None:
            self._sender.send(batch)

    def _abort_ranks(self) -> None:
        """Ends the other ranks, which may be in a step that this rank has not computed. Their next
        step would not be this one's.
        """
        if self._ranks is not None:
            self._ranks.abort()
