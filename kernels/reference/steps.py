"""Recorded steps: torch alone records none."""

from collections.abc import Callable

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.recorded_step import Arena, RecordedStep

__all__ = ["mark_step", "point_to", "record_step"]


def record_step(
    device: torch.device, arena: Arena, run: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, RecordedStep | None]:
    """Runs a step and, where the device's kernels can, records it.

    What the kernels give to `run` may be unset memory: a recorded step computes afterwards.

    Args:
        device: of the step.
        arena: of the recorded step.
        run: computes the step from tensors that stay where they are, and that the caller keeps
            for as long as the step. Is called again where the step cannot be recorded.

    Returns:
        The result, and the step, to be run again; None where steps are not recorded.
    """
    return run(), None


def mark_step(device: torch.device, number: int) -> None:
    """Notes a place in the step that is recorded: `RecordedStep.run` tells when it is passed.

    Args:
        device: of the step.
        number: what it tells. Nothing is noted where nothing is recorded.
    """


def point_to(recorded: AttentionMetadata, current: AttentionMetadata) -> None:
    """Makes steps recorded with `recorded` read the tensors of `current`, of as many tokens."""
    raise NotImplementedError("the reference records no steps")
