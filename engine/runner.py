"""`Runner`: what the engine needs of whatever executes its batches.

`engine.runtime.model_runner.ModelRunner` is the real one. Tests drive the
scheduler with a fake of these few methods; so nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine.batch import ScheduledBatch, StepOutput
from kvstore.layout import KvLayout

__all__ = ["LayersComputed", "ModelInfo", "PendingOutput", "Runner", "StepCosts"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts of a loaded model that scheduling and serving need.

    Attributes:
        max_model_len: the most prompt and generated tokens together.
        vocab_size: token ids are below it.
        eos_token_ids: ids that end a generation, from the model's
            generation_config.json and config.json.
        fingerprint: digest of config and weights.
        layout: shape of a KV block, whose layers are those of one layer group.
        windows: per layer group, as in `engine.kv_cache.spec.KvCacheSpec`.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: bytes
    layout: KvLayout
    windows: tuple[int | None, ...] = (None,)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What preemption weighs, as measured when the runner was made.

    Attributes:
        prompt_token_s: seconds to compute one more token of a prompt.
        swapped_block_s: seconds to copy one block out of the pool, or back in.
    """

    prompt_token_s: float
    swapped_block_s: float


LayersComputed = Callable[[int, int], None]
"""Hears, in the thread that executes a step, that in it the leading layers of blocks are
computed: its number, and how many layers of a block."""


class PendingOutput(Protocol):
    """What a step that was submitted will bring."""

    def result(self) -> StepOutput:
        """Waits until the device is done with the step, whatever becomes of it: the blocks
        that it touched may be given to others, and moved beside later steps.

        Raises:
            Exception: whatever made the step fail.
        """


class Runner(Protocol):
    """Executes batches, in the order in which they come, on a model with a paged KV pool."""

    info: ModelInfo
    num_blocks: int
    """Blocks in the pool, measured when the runner was made."""
    num_host_blocks: int
    """Blocks in the host pool that sequences are swapped to; 0 without one."""
    costs: StepCosts

    @property
    def kv_pool(self) -> Any:
        """The pool tensor `[num_blocks, *info.layout.block_shape]`."""

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Runs one step; see `ScheduledBatch` for the order of its parts."""

    def submit(self, batch: ScheduledBatch) -> PendingOutput:
        """Runs one step beside the caller, after those submitted before it.

        Raises:
            Exception: why the step could not be started; nothing of it runs any more.
        """

    def watch_layers(self, tell: LayersComputed) -> None:
        """Has `tell` hear of layers before their step is over, where that is known. What
        it is not told of is computed when the step's output is there.
        """

    def close(self) -> None:
        """Ends what `submit` started. Idempotent."""
