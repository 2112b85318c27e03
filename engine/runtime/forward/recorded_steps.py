"""`RecordedSteps`: runs forward passes, replaying recorded ones when possible.

Two steps with the same number of tokens and of logit rows differ only in token ids, positions
and the places of their KV. These inputs are always written to the same memory, so the model's
Python code runs for the first such step only; later ones replay its kernel calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import kernels
from engine.models.layers import CausalModel
from engine.runtime.draws.sampler import Scores
from engine.runtime.forward.batch_inputs import BatchInputs, KeptMemory, StepInputs
from engine.runtime.state_pool import StateMemory
from kernels import Arena, PagedKv, RecordedStep
from kvstore.mover.pool_objects import BlockViews

__all__ = ["OnLayer", "RecordedSteps"]

_MAX_RECORDINGS = 256  # each takes some 100 kB for a model of many layers
_MAX_SIZES_SEEN = 256
# Longer steps are not recorded: recordings keep the working memory of the largest one, and the
# longer a step is, the smaller is Python's share of its time.
_MAX_TOKENS = 512

OnLayer = Callable[[int], None]
"""Called with the number of layers computed so far, as `kernels.PagedKv.on_layer`."""

_Size = tuple[int, int]  # number of tokens, number of logit rows
_RowMaxima = tuple[torch.Tensor, torch.Tensor]  # `Scores.maxima` and `Scores.likeliest`


@dataclass(slots=True)
class _Recording:
    """A recorded step of one size.

    Attributes:
        step: the recorded kernel calls.
        inputs: the inputs that they read, in the memory of all steps' inputs.
        num_seqs: the number of sequences that they read; unlike the number of tokens, it
            may differ between steps of one size.
    """

    step: RecordedStep
    inputs: BatchInputs
    num_seqs: int

    def run(self, inputs: StepInputs, on_layer: OnLayer | None) -> torch.Tensor:
        """Replays the recording on the current inputs, which have the same size."""
        if self.num_seqs != inputs.num_seqs:
            current = inputs.tensors().layer_groups
            for recorded, other in zip(self.inputs.layer_groups, current, strict=True):
                kernels.point_to(recorded, other)
            self.num_seqs = inputs.num_seqs
        return self.step.run(on_layer)


class RecordedSteps:
    """Runs a model's forward passes.

    A step that only decodes is recorded when its size first occurs. A step with chunks is
    recorded when its size occurs again, because prompts have many lengths.

    Args:
        model: the model.
        kv: its KV cache, which keeps its memory.
        slots: `PagedKv.slots`.
        inputs: the inputs, which the caller fills before each step.
        kept: memory for the hidden states of logit rows that steps keep; None to keep none.
        states: the slots of states, which keep their memory; None for a model without.

    Attributes:
        inputs: the inputs of the next step.
    """

    def __init__(
        self,
        model: CausalModel,
        kv: BlockViews,
        slots: Sequence[tuple[int, int]],
        inputs: StepInputs,
        kept: KeptMemory | None = None,
        states: StateMemory | None = None,
    ) -> None:
        self._model, self._kv, self._slots, self._state_memory = model, kv, slots, states
        self.inputs, self._kept = inputs, kept
        max_logit_rows = inputs.max_logit_rows
        self._device = kv.states.device
        self._maxima = torch.empty(max_logit_rows, device=self._device)
        self._likeliest = torch.empty(max_logit_rows, dtype=torch.int64, device=self._device)
        self._arena = Arena()
        # Both are in order of last use, the least recent first.
        self._recordings: dict[_Size, _Recording] = {}
        self._seen: dict[_Size, None] = {}  # sizes that occurred once
        self._is_recordable = True  # False once an attempt has failed, for all sizes

    def scores(self, on_layer: OnLayer | None = None) -> Scores:
        """Returns the scores of the inputs' logit rows. The next call may overwrite them.

        Args:
            on_layer: called after each layer, except in a step that is being recorded.
        """
        row_maxima = self._row_maxima(self._size)
        if self.inputs.needs_all_hidden:
            return self._run_all(row_maxima, on_layer)
        return Scores(self.run(on_layer), *row_maxima, states=self._states)

    def run(self, on_layer: OnLayer | None = None) -> torch.Tensor:
        """Returns the logits of `scores`; on a stage before the last, hidden states of all tokens.

        Args:
            on_layer: as in `scores`.
        """
        size = self._size
        recording = self._recordings.pop(size, None)
        if recording is not None:
            self._recordings[size] = recording
            return recording.run(self.inputs, on_layer)
        if self._should_record(size):
            return self._record(size)
        return self._run(self.inputs.tensors(), self._row_maxima(size), on_layer)

    @property
    def _states(self) -> torch.Tensor | None:
        return None if self._kept is None else self._kept.memory[:, : self.inputs.num_logit_rows]

    @property
    def _size(self) -> _Size:
        return self.inputs.num_tokens, self.inputs.num_logit_rows

    def _should_record(self, size: _Size) -> bool:
        num_tokens, num_logit_rows = size
        if not self._is_recordable or num_tokens > _MAX_TOKENS:
            return False
        if num_tokens == num_logit_rows or size in self._seen:
            return True
        _keep_below(_MAX_SIZES_SEEN, self._seen)
        self._seen[size] = None
        return False

    def _record(self, size: _Size) -> torch.Tensor:
        self._seen.pop(size, None)
        inputs, row_maxima = self.inputs.tensors(), self._row_maxima(size)
        mark_layer = partial(kernels.mark_step, self._device)
        result, step = kernels.record_step(
            self._device, self._arena, lambda: self._run(inputs, row_maxima, mark_layer)
        )
        if step is None:
            self._is_recordable = False
            return result
        _keep_below(_MAX_RECORDINGS, self._recordings)
        self._recordings[size] = _Recording(step, inputs, self.inputs.num_seqs)
        return result

    def _row_maxima(self, size: _Size) -> _RowMaxima:
        """Returns the output buffers of steps of this size; recordings reuse them."""
        _, num_logit_rows = size
        return self._maxima[:num_logit_rows], self._likeliest[:num_logit_rows]

    @torch.inference_mode()
    def _run(
        self, inputs: BatchInputs, row_maxima: _RowMaxima, on_layer: OnLayer | None
    ) -> torch.Tensor:
        hidden = self._hidden(inputs, on_layer)
        return self._logits(hidden, row_maxima) if self._model.part.is_last else hidden

    @torch.inference_mode()
    def _run_all(self, row_maxima: _RowMaxima, on_layer: OnLayer | None) -> Scores:
        """Runs a step that needs the hidden states of all tokens; such steps are not recorded."""
        inputs = self.inputs.tensors()
        hidden = self._hidden(inputs, on_layer)
        logits = self._logits(inputs.logit_states(hidden), row_maxima)
        return Scores(logits, *row_maxima, hidden, self._states)

    def _hidden(self, inputs: BatchInputs, on_layer: OnLayer | None) -> torch.Tensor:
        memory = self._state_memory
        kv = PagedKv(
            self._kv.states,
            inputs.layer_groups,
            self._slots,
            inputs.logit_rows if self._model.part.is_last else None,
            scales=self._kv.scales,
            on_layer=on_layer,
            state_group=None if memory is None else memory.layer_group,
            states=() if memory is None else memory.layers,
            group_shapes=self._kv.group_shapes,
        )
        kept = None
        if self._kept is not None:
            kept = self._kept.states_of(inputs, self.inputs.num_logit_rows)
        hidden: torch.Tensor = self._model(inputs.of_model, inputs.positions, kv, kept)
        return hidden

    def _logits(self, hidden: torch.Tensor, row_maxima: _RowMaxima) -> torch.Tensor:
        logits = self._model.logits(hidden)
        if len(logits):
            kernels.row_maxima(logits, row_maxima)
        return logits


def _keep_below(limit: int, entries: dict[_Size, Any]) -> None:
    """Removes the first entry if there are `limit` entries."""
    if len(entries) == limit:
        del entries[next(iter(entries))]
