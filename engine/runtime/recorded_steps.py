"""`RecordedSteps`: forward passes, run from recordings where they can.

Between two steps of as many tokens, of which as many ask for logits, nothing differs but
token ids, positions and where the KV is: so the model's Python runs for the first of them,
and from then on its kernels alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import kernels
from engine.models.layers import CausalModel
from engine.runtime.batch_inputs import BatchInputs
from kernels import Arena, AskingTokens, AttentionMetadata, PagedKv, RecordedStep

__all__ = ["RecordedSteps"]

_MAX_RECORDINGS = 256  # some hundred kilobytes each for a model of many layers
_MAX_SIZES_SEEN = 256
# Of a recorded step: recordings keep as much memory as the largest of them computes in, and
# the longer a step is, the less of its time is Python's.
_MAX_TOKENS = 512

_Size = tuple[int, int]  # tokens, and those of them that ask


@dataclass(frozen=True, slots=True)
class _Recording:
    """A step, and the tensors and metadata that it reads."""

    inputs: BatchInputs
    step: RecordedStep

    def run(self, inputs: BatchInputs) -> torch.Tensor:
        """Runs it on a step of the same size."""
        own = self.inputs
        own.token_ids.copy_(inputs.token_ids)
        own.positions.copy_(inputs.positions)
        _point_to(own.groups, inputs.groups)
        if own.asking is not None and inputs.asking is not None:
            own.asking.rows.copy_(inputs.asking.rows)
            _point_to(own.asking.groups, inputs.asking.groups)
        return self.step.run()


class RecordedSteps:
    """Runs a model on steps.

    A step that only decodes is recorded when its size first comes, one that has chunks when it
    comes again: prompts have many lengths.

    Args:
        model: what runs.
        kv_pool: its KV cache, which stays where it is.
        slots: see `PagedKv.slots`.
    """

    def __init__(
        self, model: CausalModel, kv_pool: torch.Tensor, slots: Sequence[tuple[int, int]]
    ) -> None:
        self._model, self._kv_pool, self._slots = model, kv_pool, slots
        self._arena = Arena()
        # The longest unused first, both.
        self._recordings: dict[_Size, _Recording] = {}
        self._seen: dict[_Size, None] = {}  # sizes that came once
        self._is_recordable = True  # whatever the size; until the first attempt

    def logits(self, inputs: BatchInputs) -> torch.Tensor:
        """Scores of what follows each asking token, `[num_asking, vocab]` float32.

        The next call may overwrite them.
        """
        size = len(inputs.token_ids), inputs.num_asking
        recording = self._recordings.pop(size, None)
        if recording is not None:
            self._recordings[size] = recording
            return recording.run(inputs)
        if self._is_to_be_recorded(inputs, size):
            return self._record(inputs, size)
        return self._run(inputs)

    def _is_to_be_recorded(self, inputs: BatchInputs, size: _Size) -> bool:
        if not self._is_recordable or len(inputs.token_ids) > _MAX_TOKENS:
            return False
        if inputs.asking is None or size in self._seen:
            return True
        _keep_below(_MAX_SIZES_SEEN, self._seen)
        self._seen[size] = None
        return False

    def _record(self, inputs: BatchInputs, size: _Size) -> torch.Tensor:
        self._seen.pop(size, None)
        own = _copy_of(inputs)
        logits, step = kernels.record_step(
            self._kv_pool.device, self._arena, lambda: self._run(own)
        )
        if step is None:
            self._is_recordable = False
            return logits
        _keep_below(_MAX_RECORDINGS, self._recordings)
        self._recordings[size] = _Recording(own, step)
        return logits

    def _run(self, inputs: BatchInputs) -> torch.Tensor:
        kv = PagedKv(self._kv_pool, inputs.groups, self._slots, inputs.asking)
        return self._model.logits(self._model(inputs.token_ids, inputs.positions, kv))


def _keep_below(limit: int, entries: dict[_Size, Any]) -> None:
    """Drops the first entry if there are `limit`."""
    if len(entries) == limit:
        del entries[next(iter(entries))]


def _copy_of(inputs: BatchInputs) -> BatchInputs:
    """Inputs of their own for a recording, with what they were recorded with."""
    asking = inputs.asking
    return BatchInputs(
        token_ids=inputs.token_ids.clone(),
        positions=inputs.positions.clone(),
        groups=tuple(replace(group) for group in inputs.groups),
        asking=asking
        and AskingTokens(asking.rows.clone(), [replace(group) for group in asking.groups]),
    )


def _point_to(recorded: Sequence[AttentionMetadata], current: Sequence[AttentionMetadata]) -> None:
    for own, other in zip(recorded, current, strict=True):
        kernels.point_to(own, other)
