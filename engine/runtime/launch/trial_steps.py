"""`TrialSteps`: steps of dummy tokens, which measure memory and time before there is a pool."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from baton.common.request.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.batch import NO_LOGPROBS, ScheduledBatch, ScheduledChunk
from engine.config import EngineConfig
from engine.draw_params import DrawParams, LogitRules
from engine.runner import ModelInfo
from engine.runtime.kv_pool import DeviceMemory, allocate_pool
from engine.runtime.state_pool import StateMemory, num_region_blocks
from engine.runtime.steps.steps import Steps
from kvstore.layout import KvLayout, StateLayout

__all__ = ["TrialSteps"]

_WARM_UP_TOKENS = 16
_TIMED_TOKENS_ON_CPU = 32
_NUM_TIMED_CHUNKS = 3
_DUMMY_DRAW = DrawParams(SamplingParams(top_k=50, top_p=0.9), seed=0)
_DUMMY_RULED_DRAW = replace(_DUMMY_DRAW, rules=LogitRules(1, repetition_penalty=2.0))


class TrialSteps:
    """Runs steps of a loaded model on a pool of one block.

    Args:
        config: the flags.
        make_steps: makes the steps over a pool, with the slots in it.
        layout: of a block of the pool.
        states: of a slot; None for a model without states.
        info: the model's properties.
        device: where the model is.
        num_spare_blocks: blocks that the steps need behind those of the pool.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_steps: Callable[[torch.Tensor, StateMemory | None], Steps],
        layout: KvLayout,
        states: StateLayout | None,
        info: ModelInfo,
        device: torch.device,
        *,
        num_spare_blocks: int,
    ) -> None:
        self._config = config
        self._make_steps = make_steps
        self._layout, self._states = layout, states
        self._device = device
        self._info = info
        self._num_spare_blocks = num_spare_blocks
        self._is_on_cpu = device.type == "cpu"

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
            num_tokens = min(_WARM_UP_TOKENS, self._config.max_step_tokens)
            self.run(num_tokens, min(2, self._config.max_running))
            return None
        gc.collect()  # of earlier steps, whose memory would count beside that of this one
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self.run(self._config.max_step_tokens, self._config.max_running, uses_all_memory=True)
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

    def _measure_graphs(self) -> int:
        """Returns the number of bytes that the steps' CUDA graphs will need."""
        num_bytes = self._make_steps(*self._dummy_pool()).graph_bytes()
        gc.collect()  # so that these graphs do not count beside those that will serve
        torch.cuda.empty_cache()  # torch also caches the memory of deleted graphs
        return num_bytes

    def run(self, num_tokens: int, max_seqs: int, *, uses_all_memory: bool = False) -> int:
        """Runs a step of up to `num_tokens` tokens, which all write their KV to one block.

        Args:
            num_tokens: the most tokens.
            max_seqs: the most sequences.
            uses_all_memory: whether the sequences have logit rules and draft tokens, if the
                engine drafts, and log-probabilities of all tokens are reported. The step then
                runs twice, as the first run allocates the table of rules after the forward pass.

        Returns:
            The number of tokens of the step.
        """
        max_drafts = self._config.max_drafts if uses_all_memory else 0
        lengths = _dummy_lengths(num_tokens, max_seqs, self._info.max_model_len, 1 + max_drafts)
        chunks = tuple(
            ScheduledChunk(
                row,
                (0,) * length,
                0,
                (_DUMMY_RULED_DRAW if uses_all_memory else _DUMMY_DRAW,),
                num_drafts=min(max_drafts, length - 1),
                wants_logprobs=True,
                num_logprobs=MAX_LOGPROBS if uses_all_memory else NO_LOGPROBS,
                prompt_targets=(0,) * length if uses_all_memory else (),
                num_prompt_logprobs=MAX_LOGPROBS,
            )
            for row, length in enumerate(lengths)
        )
        batch = ScheduledBatch(0, chunks)
        steps = self._make_steps(*self._dummy_pool())
        for _ in range(1 + uses_all_memory):
            steps.update(batch)
            steps.launch(batch).result()
        steps.finish()
        return batch.num_tokens

    def _dummy_pool(self) -> tuple[torch.Tensor, StateMemory | None]:
        """Returns a pool of one block for all KV of dummy steps, one slot for all states, and the
        steps' spare ones.
        """
        states, num_spare = self._states, self._num_spare_blocks
        num_state_blocks = num_region_blocks(states, self._layout, 1 + num_spare)
        num_blocks = 1 + num_state_blocks + num_spare
        pool = allocate_pool(num_blocks, self._layout, self._device)
        if states is None:
            return pool, None
        region = pool[1 : 1 + num_state_blocks]
        return pool, StateMemory.of(region, states, len(self._info.windows))

    def time_prompt_token(self) -> float:
        """Measures the seconds per token of a long chunk. `profile` has warmed up before.

        Other workers may start on the same cores, and routers compare replicas by this until
        prompts have been measured. So the chunk is timed a few times, as often on each rank, and
        the fastest counts.
        """
        num_tokens = self._config.max_step_tokens
        if self._is_on_cpu:
            num_tokens = min(num_tokens, _TIMED_TOKENS_ON_CPU)
        times: list[float] = []
        for _ in range(_NUM_TIMED_CHUNKS):
            start = time.perf_counter()
            num_computed = self.run(num_tokens, max_seqs=1)
            times.append((time.perf_counter() - start) / num_computed)
        return min(times)


def _dummy_lengths(
    num_tokens: int, max_seqs: int, max_model_len: int, shortest: int = 1
) -> Iterator[int]:
    """Yields lengths that sum to `num_tokens`, of as many sequences as possible; the first ones
    are as long as possible, and none is shorter than `shortest`.
    """
    shortest = min(shortest, num_tokens)
    num_seqs = min(max_seqs, num_tokens // shortest)
    num_spare = num_tokens - num_seqs * shortest
    for _ in range(num_seqs):
        num_extra = min(num_spare, max_model_len - shortest)
        num_spare -= num_extra
        yield shortest + num_extra
