"""Stand-ins for CUDA graphs on the CPU: they rerun the same operations on the same memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.runtime.steps.device_steps import DeviceSteps
from engine.runtime.steps.stage_steps import DeviceStageSteps
from engine.runtime.steps.steps import StepModel
from kernels import AttentionMetadata, reference
from kernels.recorded_step import RecordedStep

__all__ = [
    "EagerDeviceStageSteps",
    "EagerDeviceSteps",
    "RerunDeviceStageSteps",
    "RerunDeviceSteps",
    "TracedDeviceStageSteps",
    "TracedDeviceSteps",
    "TracedStep",
    "attend_without_reads",
]


def attend_without_reads(
    query: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMetadata, **rule: Any
) -> torch.Tensor:
    """Computes `reference.paged_attention` without reading the lengths of queries on the host.

    Each token is a sequence of its own, whose context ends with it.
    """
    if meta.max_query_len > 1:
        tokens = torch.arange(len(query), device=query.device)
        starts = meta.query_starts.long()
        sequence_of = torch.searchsorted(starts, tokens, right=True) - 1
        num_after = starts[1:][sequence_of] - 1 - tokens
        meta = replace(
            meta,
            block_tables=meta.block_tables[sequence_of],
            context_lens=(meta.context_lens[sequence_of] - num_after).int(),
            max_query_len=1,
        )
    return reference.paged_attention(query, kv_layer, meta, **rule)


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    results: list[torch.Tensor]  # new tensors that it filled

    def run(self) -> None:
        again = tree_leaves(self.function(*self.args, **self.kwargs))
        for result, value in zip(self.results, _tensors(again), strict=True):
            result.copy_(value)


class TracedStep(RecordedStep):
    """A function's operations, which can run again without the function.

    Reading a value on the host fails, as it does while a graph is captured. Views are not run
    again, since they exist already.
    """

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.operations: list[_Operation] = []
        with _Tracing(self.operations):
            self._output = run()

    def run(self) -> torch.Tensor:
        for operation in self.operations:
            operation.run()
        return self._output


class _Tracing(TorchDispatchMode):
    def __init__(self, operations: list[_Operation]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the step waits for the device")
        kwargs = kwargs or {}
        places = {_place(tensor) for tensor in _tensors(tree_leaves((args, kwargs)))}
        result = function(*args, **kwargs)
        results = _tensors(tree_leaves(result))
        is_view = all(_place(tensor) in places for tensor in results)
        if not is_view:
            self._operations.append(_Operation(function, args, kwargs, results))
        elif function._schema.is_mutable:
            self._operations.append(_Mutation(function, args, kwargs, []))
        return result


class _Mutation(_Operation):
    def run(self) -> None:
        self.function(*self.args, **self.kwargs)


def _tensors(leaves: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class EagerDeviceSteps(DeviceSteps):
    """Runs every step eagerly, as with `--enforce-eager`."""

    def __init__(self, model: StepModel) -> None:
        super().__init__(replace(model, enforce_eager=True))


class EagerDeviceStageSteps(DeviceStageSteps):
    """`EagerDeviceSteps` of a stage before the last."""

    def __init__(self, model: StepModel) -> None:
        super().__init__(replace(model, enforce_eager=True))


class TracedDeviceSteps(DeviceSteps):
    """Traces steps; needs kernels that are made of torch's operations."""

    def __init__(self, model: StepModel) -> None:
        super().__init__(model, TracedStep)


class TracedDeviceStageSteps(DeviceStageSteps):
    """`TracedDeviceSteps` of a stage before the last."""

    def __init__(self, model: StepModel) -> None:
        super().__init__(model, TracedStep)


class _Rerun(RecordedStep):
    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run

    def run(self) -> torch.Tensor:
        return self._run()


class RerunDeviceSteps(DeviceSteps):
    """Calls the function that a graph would record, for kernels that cannot be traced."""

    def __init__(self, model: StepModel) -> None:
        super().__init__(model, _Rerun)


class RerunDeviceStageSteps(DeviceStageSteps):
    """`RerunDeviceSteps` of a stage before the last."""

    def __init__(self, model: StepModel) -> None:
        super().__init__(model, _Rerun)
