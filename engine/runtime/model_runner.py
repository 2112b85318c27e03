"""`ModelRunner`: executes scheduled batches on a model with a paged KV pool."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

import kernels
from baton.common.errors import ConfigurationError
from baton.common.request.sampling_params import MAX_LOGPROBS
from engine.batch import NO_LOGPROBS, ScheduledBatch, ScheduledChunk, StepOutput
from engine.config import EngineConfig
from engine.draw_params import DrawParams, LogitRules
from engine.kv_cache.spec import LayerGroups, group_layers, spec_of
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.runner import LayersComputed, ModelInfo, PendingOutput, StepCosts
from engine.runtime.device import current, fetch, resolve_device, used_bytes, wait_for
from engine.runtime.drafting.drafters import make_drafter
from engine.runtime.draws.logits_processors import (
    ProcessorContext,
    check_extra_args,
    load_processors,
    make_processors,
)
from engine.runtime.forward.memory_plan import MemoryPlan
from engine.runtime.kv_pool import (
    DeviceMemory,
    allocate_host_pool,
    allocate_pool,
    check_kv_cache_dtype,
    decide_layout,
    decide_num_blocks,
    decide_num_host_blocks,
    default_cpu_bytes,
    log_pool,
    share_of,
)
from engine.runtime.launch.worker_plan import plan_memory, start_threads
from engine.runtime.rank_batches import (
    BatchSender,
    check_same_engine,
    check_same_pools,
    least_of_all,
)
from engine.runtime.steps.device_stage_steps import DeviceStageSteps
from engine.runtime.steps.device_steps import DeviceSteps
from engine.runtime.steps.host_steps import HostSteps
from engine.runtime.steps.stage_steps import StageSteps
from engine.runtime.steps.steps import LaunchedStep, StepModel, Steps
from engine.runtime.turns import Turns
from engine.runtime.weights.loader import LoadedModel, load_model
from engine.step_watch import SLOW_FACTOR
from kernels import EngineRanks, RanksLostError
from kvstore.mover.pool_objects import view_blocks

__all__ = ["ModelRunner"]

_MAX_MODEL_LEN = 2**26  # block tables have room for it; config.json may state any integer
_WARM_UP_TOKENS = 16
_TIMED_TOKENS_ON_CPU = 32
_TIMED_BLOCKS = 8
_MEBIBYTE = 2**20
# The ranks end first, so that the engine can end them: a frozen one does not end by itself.
_SHARE_OF_STEP_TIMEOUT = 0.8
_DUMMY_DRAW = DrawParams(temperature=1.0, top_k=50, top_p=0.9, seed=0)
_DUMMY_RULED_DRAW = replace(_DUMMY_DRAW, rules=LogitRules(1, repetition_penalty=2.0))


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
        costs: measured times that preemption compares.

    Raises:
        ConfigurationError: a flag or the checkpoint is invalid, or the pool cannot
            hold one request.
    """

    info: ModelInfo
    num_blocks: int
    num_host_blocks: int
    costs: StepCosts

    def __init__(
        self, config: EngineConfig, *, progress: bool = True, ranks: EngineRanks | None = None
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._num_local = 1 if ranks is None else ranks.num_local
        self._sender = None if ranks is None or ranks.rank else BatchSender(ranks)
        part = _part_of(ranks)
        # Other stages compute without turns, and before this one.
        self._sends_early = not part.is_first
        local_rank = None if ranks is None else ranks.local_rank
        self._device = resolve_device(config.device, local_rank)
        check_kv_cache_dtype(config.kv_cache_dtype, self._device)
        self._steps_type = _steps_type_of(part, self._device)
        if self._is_on_cpu:
            start_threads(config, self._num_local)
        # Before minutes of loading, as an unknown name is an error.
        processor_classes = load_processors(config.logits_processors)
        used_by_others = used_bytes(self._device)
        loaded = load_model(
            config.model,
            config.dtype,
            self._device,
            progress=progress,
            load_format=config.load_format,
            weights_folder=config.weights_folder,
            part=part,
        )
        self._loaded, self._dtype = loaded, getattr(torch, loaded.dtype)
        self._model = loaded.model
        if ranks is not None and loaded.dtype == "float16":  # whose products are rounded too early
            raise ConfigurationError(
                f"the engine has {ranks.size} ranks; --dtype float16 works with 1 only: use "
                "bfloat16 or float32"
            )
        layer_groups = group_layers(loaded.sliding_windows)
        self._layer_slots = layer_groups.slots_of(part.stage, part.num_stages)
        self.info = _model_info(loaded, layer_groups, config)
        self._layout = self.info.layout
        if ranks is not None:
            share = share_of(ranks.rank, ranks, self._layout.num_kv_heads)
            self._layout = share.layout_of(self._layout)
        if ranks is not None:
            check_same_engine(ranks, config, self.info)
        self._drafter = make_drafter(config, loaded, self.info, self._device, progress=progress)
        self._processors = make_processors(
            processor_classes,
            ProcessorContext(
                vocab_size=self.info.vocab_size,
                device=self._device,
                max_rows=config.max_running,
                max_model_len=self.info.max_model_len,
            ),
        )
        has_turns = self._is_on_cpu and part.num_stages == 1
        self._turns = Turns(config.turns_folder if has_turns else None)
        with self._turns.wait_for_turn():  # so that no other engine's step distorts the times
            free_bytes = self.profile(used_by_others)
            prompt_token_s = self._time_prompt_token()
            self._make_pools(free_bytes)
            self.costs = StepCosts(prompt_token_s, self._time_swapped_block())
            if self._drafter is not None:
                draft_token_s, proposal_s = self._drafter.time_work()
                self.costs = replace(
                    self.costs,
                    draft_token_s=draft_token_s,
                    proposal_s=proposal_s,
                    max_proposals=self._drafter.max_proposals,
                )
            self._steps = self._new_steps(self._whole_pool)
            self._steps.warm_up()
            self._whole_pool[0].zero_()  # dummy steps may have written KV to it
        if ranks is not None:
            self._wait_limit_s = config.step_timeout_s * _SHARE_OF_STEP_TIMEOUT
            ranks.limit_waits(self._wait_limit_s)
            # Of the steps that may be in flight in all stages: a wait may be for the oldest one.
            self._recent_tokens = deque([0], part.num_stages + 1)
        self._thread: ThreadPoolExecutor | None = None

    @property
    def kv_pool(self) -> torch.Tensor:
        """The pool, `[num_blocks, *info.layout.block_shape]`, without spare blocks. One of several
        ranks has its part of the heads.
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
        """Waits for submitted steps, ends the thread and closes the turns' files. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
        wait_for(self._device)
        self._turns.close()
        if self._ranks is not None:
            self._ranks.close()

    @property
    def turn_wait_s(self) -> float:
        """Seconds that it has waited for its turn, the present wait included."""
        return self._turns.waited_s

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
        kernels.swap_blocks(self._host_pool, self.kv_pool, batch.swap_ins)
        kernels.swap_blocks(self.kv_pool, self._host_pool, batch.swap_outs)
        kernels.copy_blocks(self.kv_pool, batch.block_copies)
        if not batch.num_tokens:
            if not self._sends_early:
                self._pass_on(batch)
            copies_done = fetch(self._device, ())
            group = None if self._ranks is None else self._ranks.device_group
            return LaunchedStep(copies_done, lambda _: StepOutput(batch.step), group)
        with self._turns.wait_for_turn():
            if not self._sends_early:
                self._pass_on(batch)  # now, as the other ranks wait for this one's part
            return self._steps.launch(batch)

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

    def profile(self, used_by_others: int) -> int | None:
        """Runs a dummy step before there is a pool.

        On a GPU this is the largest step that the flags allow, to measure memory; on a
        CPU a short prompt beside a single token, to warm up.

        Args:
            used_by_others: bytes in use on the GPU before the model was loaded.

        Returns:
            Bytes left for the pool; None on a CPU.
        """
        if self._is_on_cpu:
            num_tokens = min(_WARM_UP_TOKENS, self._config.max_num_batched_tokens)
            self._run_dummy(num_tokens, min(2, self._config.max_running))
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._run_dummy(
            self._config.max_num_batched_tokens, self._config.max_running, uses_all_memory=True
        )
        peak_reserved = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        memory = DeviceMemory(
            total=total,
            free=free,
            used_by_others=used_by_others,
            reserved=torch.cuda.memory_reserved(self._device),
            peak_reserved=peak_reserved,
            graphs=self._measure_graphs(),
        )
        return memory.left_for_pool(self._config.gpu_memory_utilization)

    @property
    def _is_on_cpu(self) -> bool:
        return self._device.type == "cpu"

    def _measure_graphs(self) -> int:
        """Returns the number of bytes that the steps' CUDA graphs will need."""
        num_bytes = self._new_steps(self._dummy_pool()).graph_bytes()
        torch.cuda.empty_cache()  # torch also caches the memory of deleted graphs
        return num_bytes

    def _run_dummy(self, num_tokens: int, max_seqs: int, *, uses_all_memory: bool = False) -> int:
        """Runs a step of up to `num_tokens` tokens, which all write their KV to one block.

        Args:
            num_tokens: the most tokens.
            max_seqs: the most sequences.
            uses_all_memory: whether the sequences have logit rules, and log-probabilities of
                all tokens are reported. The step then runs twice, as the first run allocates
                the table of rules after the forward pass.

        Returns:
            The number of tokens of the step.
        """
        lengths = _dummy_lengths(num_tokens, max_seqs, self.info.max_model_len)
        chunks = tuple(
            ScheduledChunk(
                row,
                (0,) * length,
                0,
                (_DUMMY_RULED_DRAW if uses_all_memory else _DUMMY_DRAW,),
                wants_logprobs=True,
                num_logprobs=MAX_LOGPROBS if uses_all_memory else NO_LOGPROBS,
                prompt_targets=(0,) * length if uses_all_memory else (),
                num_prompt_logprobs=MAX_LOGPROBS,
            )
            for row, length in enumerate(lengths)
        )
        batch = ScheduledBatch(0, chunks)
        steps = self._new_steps(self._dummy_pool())
        for _ in range(1 + uses_all_memory):
            steps.update(batch)
            steps.launch(batch).result()
        steps.finish()
        return batch.num_tokens

    def _dummy_pool(self) -> torch.Tensor:
        """Returns a pool of one block for all KV of dummy steps, and the steps' spare blocks."""
        num_blocks = 1 + self._steps_type.num_spare_blocks
        return allocate_pool(num_blocks, self._layout, self._device)

    def _time_prompt_token(self) -> float:
        """Measures the seconds per token of a long chunk. `profile` has warmed up before."""
        num_tokens = self._config.max_num_batched_tokens
        if self._is_on_cpu:
            num_tokens = min(num_tokens, _TIMED_TOKENS_ON_CPU)
        start = time.perf_counter()
        num_tokens = self._run_dummy(num_tokens, max_seqs=1)
        return (time.perf_counter() - start) / num_tokens

    def _time_swapped_block(self) -> float:
        """Measures the seconds to copy one block to the host; 0 without a host pool."""
        num_blocks = min(_TIMED_BLOCKS, self.num_host_blocks)
        if not num_blocks:
            return 0.0
        pairs = tuple((block, block) for block in range(num_blocks))
        kernels.swap_blocks(self.kv_pool, self._host_pool, pairs)  # warms up
        wait_for(self._device)
        start = time.perf_counter()
        kernels.swap_blocks(self.kv_pool, self._host_pool, pairs)
        wait_for(self._device)
        return (time.perf_counter() - start) / num_blocks

    def _least(self, free_bytes: int) -> int:
        """Returns the least of what the ranks have left for their pools, which are equal."""
        if self._ranks is None:
            return free_bytes
        return least_of_all(self._ranks, free_bytes // _MEBIBYTE, self._device) * _MEBIBYTE

    def _plan_memory(self) -> MemoryPlan | None:
        return plan_memory(
            self._config,
            self._loaded,
            self._layout,
            num_local=self._num_local,
            drafter_bytes=self._drafter.fixed_bytes if self._drafter else 0,
            is_on_cpu=self._is_on_cpu,
        )

    def _make_pools(self, free_bytes: int | None) -> None:
        config, info = self._config, self.info
        layout, max_len = self._layout, info.max_model_len
        spec, drafter, plan = spec_of(config, info.windows), self._drafter, self._plan_memory()
        if free_bytes is not None and drafter is not None:
            free_bytes = max(0, free_bytes - drafter.fixed_bytes)
        self.num_blocks = decide_num_blocks(
            config,
            layout,
            spec,
            max_len,
            self._least(default_cpu_bytes(plan) if free_bytes is None else free_bytes),
            draft_block_bytes=drafter.block_bytes if drafter else 0,
            is_on_cpu=free_bytes is None,
            plan=plan,
        )
        self.num_host_blocks = decide_num_host_blocks(
            config, layout, self.num_blocks, self._device, plan
        )
        num_spare = self._steps_type.num_spare_blocks
        if self._ranks is not None:
            check_same_pools(self._ranks, self.num_blocks, self.num_host_blocks)
        self._whole_pool = allocate_pool(self.num_blocks + num_spare, layout, self._device)
        self._kv_pool = self._whole_pool[: self.num_blocks]
        kernels.copy_blocks(self._kv_pool, ((0, self.num_blocks - 1),))  # compiles it
        self._host_pool = allocate_host_pool(self.num_host_blocks, layout, self._device)
        if drafter is not None:
            drafter.allocate(self.num_blocks)
        log_pool(self.num_blocks, self.num_host_blocks, layout, spec, max_len)

    def _new_steps(self, pool: torch.Tensor) -> Steps:
        config, info = self._config, self.info
        return self._steps_type(
            StepModel(
                model=self._model,
                kv=view_blocks(pool, self._layout),
                layer_slots=self._layer_slots,
                num_layer_groups=len(info.windows),
                block_size=info.layout.block_size,
                max_rows=config.max_running,
                max_tokens=config.max_num_batched_tokens,
                max_model_len=info.max_model_len,
                enforce_eager=config.enforce_eager,
                reports_processed=config.logprobs_mode == "processed_logprobs",
                processors=self._processors,
                ranks=self._ranks,
                dtype=self._dtype,
                max_drafts=config.max_drafts,
                drafter=self._drafter,
            )
        )


def _model_info(loaded: LoadedModel, layer_groups: LayerGroups, config: EngineConfig) -> ModelInfo:
    max_model_len = config.max_model_len or loaded.max_model_len
    if max_model_len > loaded.max_model_len:
        raise ConfigurationError(
            f"--max-model-len is {max_model_len}; the model takes at most {loaded.max_model_len}"
        )
    if max_model_len > _MAX_MODEL_LEN:
        raise ConfigurationError(
            f"the model takes {max_model_len} tokens, more than can be served; "
            f"set --max-model-len to at most {_MAX_MODEL_LEN}"
        )
    return ModelInfo(
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        fingerprint=loaded.fingerprint,
        tokenizer_digest=loaded.tokenizer_digest,
        layout=decide_layout(config, loaded, layer_groups.layers_per_block),
        windows=layer_groups.windows,
    )


def _part_of(ranks: EngineRanks | None) -> ModelPart:
    """Returns the part of the model that a rank computes."""
    if ranks is None:
        return WHOLE_MODEL
    return ModelPart(ranks.group, ranks.stage, ranks.num_stages)


def _steps_type_of(part: ModelPart, device: torch.device) -> type[Steps]:
    """Returns the class that computes the steps of a part of the model on a device."""
    if device.type == "cpu":
        return HostSteps if part.is_last else StageSteps
    return DeviceSteps if part.is_last else DeviceStageSteps


def _dummy_lengths(num_tokens: int, max_seqs: int, max_model_len: int) -> Iterator[int]:
    """Yields lengths that sum to `num_tokens`, of as many sequences as possible; the first ones
    are as long as possible.
    """
    num_seqs = min(max_seqs, num_tokens)
    num_spare = num_tokens - num_seqs
    for _ in range(num_seqs):
        num_extra = min(num_spare, max_model_len - 1)
        num_spare -= num_extra
        yield 1 + num_extra
