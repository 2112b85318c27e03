"""`Steps`: the interface that computes a runner's batches, with one class for CPU and GPU each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from engine.batch import ChunkOutput, ScheduledBatch, StepOutput
from engine.models.layers import CausalModel
from engine.runner import LayersComputed, PendingOutput
from engine.runtime.device import Fetched
from engine.runtime.drafting.drafter import Drafter, ProposalJob
from engine.runtime.draws.logits_processors import LogitsProcessor
from engine.runtime.draws.rows import Rows
from engine.runtime.forward.batch_inputs import KeptMemory
from engine.runtime.state_pool import StateMemory
from kernels import AttentionMetadata, DeviceRankGroup, EngineRanks, LogitRows, PagedKv
from kvstore.mover.pool_objects import BlockViews

__all__ = ["FinishedStep", "LaunchedStep", "StepModel", "Steps"]


@dataclass(frozen=True, slots=True)
class StepModel:
    """A model, its KV cache, and the limits of steps.

    Attributes:
        model: the model.
        kv: its KV cache, which keeps its memory; the last `Steps.num_spare_blocks` of its
            blocks are for the steps alone.
        layer_slots: `PagedKv.slots`.
        states: the slots of recurrent layers' states; the last `Steps.num_spare_blocks` of them are
            for the steps alone. None for a model without.
        num_layer_groups: number of layer groups.
        block_size: tokens per KV block.
        max_rows: maximum number of sequences that run at once.
        max_tokens: maximum number of tokens in a step.
        max_model_len: maximum number of tokens in a sequence.
        enforce_eager: whether to run without CUDA graphs.
        reports_processed: whether log-probabilities of drawn tokens are those of the
            distributions that they are drawn from, instead of the model's own.
        processors: the engine's logits processors.
        ranks: all ranks of the engine; None for one.
        dtype: type of hidden states.
        max_drafts: maximum number of drafts of a sequence.
        drafter: drafts tokens after steps; None without one.
        uses_flashinfer: whether FlashInfer computes attention, in steps with prompts that are no
            CUDA graphs.
    """

    model: CausalModel
    kv: BlockViews
    layer_slots: Sequence[tuple[int, int]]
    num_layer_groups: int
    block_size: int
    max_rows: int
    max_tokens: int
    max_model_len: int
    enforce_eager: bool
    reports_processed: bool = False
    processors: Sequence[LogitsProcessor[Any]] = ()
    ranks: EngineRanks | None = None
    dtype: torch.dtype = torch.float32
    max_drafts: int = 0
    drafter: Drafter | None = None
    states: StateMemory | None = None
    uses_flashinfer: bool = False

    @property
    def max_blocks(self) -> int:
        """Maximum number of blocks of one sequence in one layer group."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_logit_rows(self) -> int:
        """Maximum number of tokens whose logits are computed in a step."""
        return min(self.max_rows * (1 + self.max_drafts), max(self.max_rows, self.max_tokens))

    @property
    def device(self) -> torch.device:
        """The device of the model and the KV cache."""
        return self.kv.states.device

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the KV cache, spare blocks included."""
        return len(self.kv.states)

    def proposal_jobs(self, batch: ScheduledBatch, rows: Rows) -> list[ProposalJob]:
        """Returns the chunks that the drafter drafts for; none without one."""
        return [] if self.drafter is None else self.drafter.jobs_of(batch, rows)

    def propose(
        self,
        jobs: Sequence[ProposalJob],
        outputs: list[ChunkOutput | None],
        states: torch.Tensor | None,
    ) -> list[ChunkOutput | None]:
        """Returns the outputs of a step's chunks with the drafter's draft tokens; the arguments are
        those of `Drafter.propose`.
        """
        return self.drafter.propose(jobs, outputs, states) if self.drafter and jobs else outputs

    def new_kept(self, num_rows: int) -> KeptMemory | None:
        """Allocates memory for the states that the drafter reads of a step with up to `num_rows`
        logit rows; returns None if it reads none.
        """
        if self.drafter is None or not self.drafter.kept_layers:
            return None
        width = self.model.config.hidden_size
        return KeptMemory.allocate(
            self.drafter.kept_layers, num_rows, width, self.dtype, self.device
        )

    def new_hidden(self) -> torch.Tensor:
        """Allocates memory for the hidden states of a step's tokens, as stages pass them on."""
        shape = self.max_tokens, self.model.config.hidden_size
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def paged_kv(
        self, layer_groups: Sequence[AttentionMetadata], logit_rows: LogitRows | None = None
    ) -> PagedKv:
        """Returns the KV cache as one step uses it; the arguments are fields of `PagedKv`."""
        states = self.states
        return PagedKv(
            self.kv.states,
            layer_groups,
            self.layer_slots,
            logit_rows,
            scales=self.kv.scales,
            state_group=None if states is None else states.layer_group,
            states=() if states is None else states.layers,
            group_shapes=self.kv.group_shapes,
        )


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The pending output of a step that has finished."""

    output: StepOutput

    def result(self) -> StepOutput:
        """Returns the output."""
        return self.output


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """The pending output of a step that was launched on the device.

    Attributes:
        fetched: the step's results, being copied to the host.
        read: builds the output from the copied results, and sends other stages what they need of
            these.
        group: the ranks whose parts the step needs; None if it needs none.
    """

    fetched: Fetched
    read: Callable[[Sequence[torch.Tensor]], StepOutput]
    group: DeviceRankGroup | None = None

    def result(self) -> StepOutput:
        """Waits for the copies, then builds the output.

        Raises:
            RanksLostError: another rank is lost.
        """
        if self.group is not None:
            self.group.wait(self.fetched.is_done)
        self.fetched.wait()
        return self.read(self.fetched.tensors)


class Steps(ABC):
    """Computes batches in order, and keeps the state of the rows between them.

    Args:
        model: the model and its limits.
    """

    num_spare_blocks: ClassVar[int]
    """Number of blocks that the steps need at the end of the pool, beyond the scheduler's."""
    is_asynchronous: bool
    """Whether steps may be launched before the results of earlier ones were read."""

    @abstractmethod
    def __init__(self, model: StepModel) -> None: ...

    @abstractmethod
    def update(self, batch: ScheduledBatch) -> None:
        """Applies a batch's changes of the rows. Called before `launch`."""

    @abstractmethod
    def launch(self, batch: ScheduledBatch) -> PendingOutput:
        """Starts the forward pass and the draws of a batch, which has at least one token."""

    def watch_layers(self, on_layers: LayersComputed) -> None:  # noqa: B027 - optional
        """Registers a function to call as layers are computed; by default it is never called."""

    def finish(self) -> None:  # noqa: B027 - optional
        """Waits for what earlier steps have drawn; afterwards other `Steps` may run."""

    @abstractmethod
    def graph_bytes(self) -> int:
        """Measures the device memory that `warm_up` will use for graphs, in bytes.

        Afterwards the object must not run steps.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Compiles and records what steps would otherwise wait for. Called before any step."""
