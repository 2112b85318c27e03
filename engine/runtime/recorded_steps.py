"""`RecordedSteps`: forward passes, run from recordings where they can.

Between two steps of as many tokens, of which as many ask for logits, nothing differs but
token ids, positions and where the KV is. All of that is put where the step before had it: so
the model's Python runs for the first of them, and from then on its kernels alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import kernels
from engine.models.layers import CausalModel
from engine.runtime.batch_inputs import BatchInputs, StepInputs
from engine.runtime.sampler import Scores
from kernels import Arena, PagedKv, RecordedStep
from kvstore.mover.pool_objects import BlockViews

__all__ = ["OnLayer", "RecordedSteps"]

_MAX_RECORDINGS = 256  # some hundred kilobytes each for a model of many layers
_MAX_SIZES_SEEN = 256
# Of a recorded step: recordings keep as much memory as the largest of them computes in, and
# the longer a step is, the less of its time is Python's.
_MAX_TOKENS = 512

OnLayer = Callable[[int], None]
"""See `kernels.PagedKv.on_layer`."""

_Size = tuple[int, int]  # tokens, and those of them that ask
_Found = tuple[torch.Tensor, torch.Tensor]  # `Scores.maxima` and `Scores.likeliest`


@dataclass(slots=True)
class _Recording:
    """A step.

    Attributes:
        step: what was recorded.
        inputs: what it reads, which is where the inputs of all steps are.
        num_seqs: how many sequences it reads there. All else is the size's.
        found: what it writes beside the logits.
    """

    step: RecordedStep
    inputs: BatchInputs
    num_seqs: int
    found: _Found

    def run(self, inputs: StepInputs, on_layer: OnLayer | None) -> Scores:
        """Runs it on a step of the same size."""
        if self.num_seqs != inputs.num_seqs:
            current = inputs.tensors().groups
            for own, other in zip(self.inputs.groups, current, strict=True):
                kernels.point_to(own, other)
            self.num_seqs = inputs.num_seqs
        return Scores(self.step.run(on_layer), *self.found)


class RecordedSteps:
    """Runs a model on steps.

    A step that only decodes is recorded when its size first comes, one that has chunks when it
    comes again: prompts have many lengths.

    Args:
        model: what runs.
        kv: its KV cache, which stays where it is.
        slots: see `PagedKv.slots`.
        inputs: to be filled with each step. Recordings read their memory.

    Attributes:
        inputs: the same.
    """

    def __init__(
        self,
        model: CausalModel,
        kv: BlockViews,
        slots: Sequence[tuple[int, int]],
        inputs: StepInputs,
    ) -> None:
        self._model, self._kv, self._slots = model, kv, slots
        self.inputs = inputs
        max_asking = inputs.max_seqs
        self._device = kv.states.device
        self._maxima = torch.empty(max_asking, device=self._device)
        self._likeliest = torch.empty(max_asking, dtype=torch.int64, device=self._device)
        self._arena = Arena()
        # The longest unused first, both.
        self._recordings: dict[_Size, _Recording] = {}
        self._seen: dict[_Size, None] = {}  # sizes that came once
        self._is_recordable = True  # whatever the size; until the first attempt

    def scores(self, on_layer: OnLayer | None = None) -> Scores:
        """Of what follows each asking token of the inputs. The next call may overwrite them.

        Args:
            on_layer: told of each layer, but for the step with which a size is recorded.
        """
        size = self.inputs.num_tokens, self.inputs.num_asking
        recording = self._recordings.pop(size, None)
        if recording is not None:
            self._recordings[size] = recording
            return recording.run(self.inputs, on_layer)
        if self._is_to_be_recorded(size):
            return self._record(size)
        found = self._found(size)
        return Scores(self._run(self.inputs.tensors(), found, on_layer), *found)

    def _is_to_be_recorded(self, size: _Size) -> bool:
        num_tokens, num_asking = size
        if not self._is_recordable or num_tokens > _MAX_TOKENS:
            return False
        if num_tokens == num_asking or size in self._seen:
            return True
        _keep_below(_MAX_SIZES_SEEN, self._seen)
        self._seen[size] = None
        return False

    def _record(self, size: _Size) -> Scores:
        self._seen.pop(size, None)
        inputs, found = self.inputs.tensors(), self._found(size)
        mark_layer = partial(kernels.mark_step, self._device)
        logits, step = kernels.record_step(
            self._device, self._arena, lambda: self._run(inputs, found, mark_layer)
        )
        scores = Scores(logits, *found)
        if step is None:
            self._is_recordable = False
            return scores
        _keep_below(_MAX_RECORDINGS, self._recordings)
        self._recordings[size] = _Recording(step, inputs, self.inputs.num_seqs, found)
        return scores

    def _found(self, size: _Size) -> _Found:
        """Where a step's go: for recordings, that they stay where they are spares making them."""
        _, num_asking = size
        return self._maxima[:num_asking], self._likeliest[:num_asking]

    @torch.inference_mode()
    def _run(self, inputs: BatchInputs, found: _Found, on_layer: OnLayer | None) -> torch.Tensor:
        states, scales = self._kv.states, self._kv.scales
        kv = PagedKv(
            states, inputs.groups, self._slots, inputs.asking, scales=scales, on_layer=on_layer
        )
        logits = self._model.logits(self._model(inputs.token_ids, inputs.positions, kv))
        if len(logits):
            kernels.row_maxima(logits, found)
        return logits


def _keep_below(limit: int, entries: dict[_Size, Any]) -> None:
    """Drops the first entry if there are `limit`."""
    if len(entries) == limit:
        del entries[next(iter(entries))]
