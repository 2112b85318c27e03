"""`Runner`: what the engine needs of whatever executes its batches.

`engine.runtime.model_runner.ModelRunner` is the real one. Tests drive the
scheduler with a fake of these few methods; so nothing here imports torch.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from engine.batch import ScheduledBatch, StepOutput
from kvstore.layout import KvLayout

__all__ = ["ModelInfo", "Runner"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts of a loaded model that scheduling and serving need.

    Attributes:
        max_model_len: the most prompt and generated tokens together.
        vocab_size: token ids are below it.
        eos_token_ids: ids that end a generation, from the model's
            generation_config.json and config.json.
        fingerprint: digest of config and weights.
        layout: shape of a KV block.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: bytes
    layout: KvLayout


class Runner(Protocol):
    """Executes batches on a model with a paged KV pool."""

    info: ModelInfo
    num_blocks: int
    """Blocks in the pool, measured when the runner was made."""

    @property
    def kv_pool(self) -> Any:
        """The pool tensor `[num_blocks, *info.layout.block_shape]`."""

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Runs one step: block copies, forward pass, draws."""
