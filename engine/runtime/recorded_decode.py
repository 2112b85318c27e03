"""`RecordedDecode`: forward passes of steps that only decode, run from recordings where they can.

Between two such steps of as many rows nothing differs but token ids, positions and where the
KV is: so the model's Python runs once per number of rows, and from then on its kernels alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import kernels
from engine.models.layers import CausalModel
from engine.runtime.batch_inputs import BatchInputs
from kernels import Arena, AttentionMetadata, PagedKv, RecordedStep

__all__ = ["RecordedDecode"]

_MAX_RECORDINGS = 256  # some hundred kilobytes each for a model of many layers


@dataclass(frozen=True, slots=True)
class _Recording:
    """A step, and the tensors that it reads.

    Attributes:
        token_ids: `[num_rows]`.
        positions: `[num_rows]`.
        groups: as of the step that was recorded.
        step: what runs again.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: Sequence[AttentionMetadata]
    step: RecordedStep


class RecordedDecode:
    """Runs a model on steps whose rows all decode.

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
        self._recordings: dict[int, _Recording] = {}  # by rows, the longest unused first
        self._is_recordable = True  # whatever the number of rows; until the first attempt

    def logits(self, inputs: BatchInputs) -> torch.Tensor:
        """Scores of each row's next token, `[num_rows, vocab]` float32.

        The next call may overwrite them.
        """
        if not self._is_recordable:
            return self._run(inputs.token_ids, inputs.positions, inputs.groups)
        num_rows = len(inputs.token_ids)
        recording = self._recordings.pop(num_rows, None)
        if recording is None:
            return self._record(inputs)
        self._recordings[num_rows] = recording
        recording.token_ids.copy_(inputs.token_ids)
        recording.positions.copy_(inputs.positions)
        for recorded, current in zip(recording.groups, inputs.groups, strict=True):
            kernels.point_to(recorded, current)
        return recording.step.run()

    def _record(self, inputs: BatchInputs) -> torch.Tensor:
        token_ids, positions = inputs.token_ids.clone(), inputs.positions.clone()
        groups = [replace(group) for group in inputs.groups]
        logits, step = kernels.record_step(
            self._kv_pool.device, self._arena, lambda: self._run(token_ids, positions, groups)
        )
        if step is None:
            self._is_recordable = False
            return logits
        if len(self._recordings) == _MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[len(token_ids)] = _Recording(token_ids, positions, groups, step)
        return logits

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        groups: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        kv = PagedKv(self._kv_pool, groups, self._slots)
        return self._model.logits(self._model(token_ids, positions, kv))
