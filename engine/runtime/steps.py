"""`Steps`: how a runner's batches are computed; on a CPU and on a GPU in two ways."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from engine.batch import ScheduledBatch, StepOutput
from engine.models.layers import CausalModel
from engine.runner import LayersComputed, PendingOutput
from engine.runtime.device import Fetched
from kernels import AttentionMetadata, LogitRows, PagedKv
from kvstore.block_views import BlockViews

__all__ = ["FinishedStep", "LaunchedStep", "StepModel", "Steps"]


@dataclass(frozen=True, slots=True)
class StepModel:
    """What runs, on which KV cache, and how large steps get.

    Attributes:
        model: what runs.
        kv: its KV cache, of `num_blocks` blocks, which stays where it is; the last
            `Steps.num_spare_blocks` of them are the steps' own.
        layer_slots: see `PagedKv.slots`.
        num_groups: layer groups.
        block_size: tokens per KV block.
        max_rows: the most sequences that run at once.
        max_tokens: the most tokens of a step.
        max_model_len: the most tokens of a sequence.
        enforce_eager: whether to do without CUDA graphs.
    """

    model: CausalModel
    kv: BlockViews
    layer_slots: Sequence[tuple[int, int]]
    num_groups: int
    block_size: int
    max_rows: int
    max_tokens: int
    max_model_len: int
    enforce_eager: bool

    @property
    def max_blocks(self) -> int:
        """The most blocks of one sequence in one group."""
        return -(-self.max_model_len // self.block_size)

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.kv.states.device

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache, the steps' own included."""
        return len(self.kv.states)

    def paged_kv(
        self, groups: Sequence[AttentionMetadata], asking: LogitRows | None = None
    ) -> PagedKv:
        """The KV cache in one step; see `PagedKv`."""
        return PagedKv(self.kv.states, groups, self.layer_slots, asking, scales=self.kv.scales)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The pending output of a step that is over."""

    output: StepOutput

    def result(self) -> StepOutput:
        """The output."""
        return self.output


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """The pending output of a step that the device has been given.

    Attributes:
        fetched: what it brings, on its way to the host.
        read: makes the output of that, once it is there.
    """

    fetched: Fetched
    read: Callable[[Sequence[torch.Tensor]], StepOutput]

    def result(self) -> StepOutput:
        """Waits for the device, then reads what the step brought."""
        self.fetched.wait()
        return self.read(self.fetched.tensors)


class Steps(ABC):
    """Computes batches, one after the other, and remembers the rows between them.

    Args:
        model: what runs.
    """

    num_spare_blocks: ClassVar[int]
    """Blocks of the pool, behind the scheduler's, that it needs for itself."""
    is_asynchronous: ClassVar[bool]
    """Whether `launch` returns before the step is over."""

    @abstractmethod
    def __init__(self, model: StepModel) -> None: ...

    @abstractmethod
    def update(self, batch: ScheduledBatch) -> None:
        """Takes over what a batch changes in the rows, before it is launched."""

    @abstractmethod
    def launch(self, batch: ScheduledBatch) -> PendingOutput:
        """Starts the forward pass and the draws of a batch of at least one token."""

    def watch_layers(self, tell: LayersComputed) -> None:  # noqa: B027 - may tell nothing
        """See `engine.runner.Runner.watch_layers`. Steps that a device is given tell nothing."""

    @abstractmethod
    def graph_bytes(self) -> int:
        """Bytes of the device that what `warm_up` records will take; steps cannot run then."""

    @abstractmethod
    def warm_up(self) -> None:
        """Prepares what would hold up the first steps. Before any step."""
