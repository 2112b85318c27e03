"""A stand-in for a GPU that computes nothing and forgives nothing: the device's own steps run on
tensors without memory (torch's `FakeTensorMode`), and kernels of Triton are noted instead of run.

While a graph is captured it refuses what would break or spoil the graph on a GPU: reading a value
on the host, tensors of the CPU, pinned memory, another stream, a version of a kernel that was not
launched before, and tensors that live on in the graphs' pool. Afterwards it refuses new versions.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from engine.config import EngineConfig
from engine.runtime.launch import launcher
from engine.runtime.steps import device_steps
from engine.runtime.steps.device_steps import DeviceSteps
from engine.runtime.weights import loader
from kernels import EngineRanks
from kernels.recorded_step import RecordedStep
from kernels.triton import attention, launch
from tests.support.specializations import Version, kernel_version

__all__ = ["Counts", "RefusedError", "StrictDevice"]

GPU = torch.device("cuda", 0)
_NUM_PROCESSORS = 132
_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
}

_READING_METHODS = frozenset(
    ("__bool__", "__float__", "__index__", "__int__", "cpu", "item", "nonzero", "numpy", "tolist")
)


class RefusedError(AssertionError):
    """The steps did what a GPU, or its graphs, would not bear."""


@dataclass
class Counts:
    """What was done since the counts were reset.

    Attributes:
        launches: kernels and operations that were launched, replays apart.
        replays: graphs that were replayed.
        sent: copies from the host to the device.
    """

    launches: int = 0
    replays: int = 0
    sent: int = 0


@dataclass
class _Capture:
    """A capture that is under way.

    Attributes:
        alive: tensors that were allocated in it, by number.
        num_bytes: of these.
        peak_bytes: the most of them at once.
    """

    alive: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    num_bytes: int = 0
    peak_bytes: int = 0

    def allocated(self, tensor: torch.Tensor) -> None:
        """Notes a new tensor, until its memory is freed."""
        storage, size = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
        number = len(self.alive) + self.num_bytes
        while number in self.alive:
            number += 1
        self.alive[number] = weakref.ref(tensor)
        self.num_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._freed, number, size)

    def _freed(self, number: int, size: int) -> None:
        self.alive.pop(number, None)
        self.num_bytes -= size


class _Replayed(RecordedStep):
    def __init__(self, output: torch.Tensor, counts: Counts) -> None:
        self._output, self._counts = output, counts

    def run(self, on_mark: Callable[[int], None] | None = None) -> torch.Tensor:
        self._counts.replays += 1
        return self._output


class _WithoutGuards(TorchFunctionMode):
    """Calls operations by their schema whose bindings look for a GPU, which torch may lack."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in _READING_METHODS and args[0].device.type == "cuda":
            raise RefusedError(f"the host waits for the device: {name}")
        if name == "__getitem__":
            return _item(*args)
        if name == "__setitem__":
            tensor, index, value = args
            part = _item(tensor, index)
            is_tensor = isinstance(value, torch.Tensor)
            return _aten.copy_.default(part, value) if is_tensor else part.fill_(value)
        if name == "copy_":
            return _aten.copy_.default(*args[:2])
        if name == "contiguous" and not args[0].is_contiguous():
            return args[0].clone(memory_format=torch.contiguous_format)
        if name == "__invert__":
            return args[0].bitwise_not()
        if name == "to":
            devices = [torch.device(a) for a in args[1:] if isinstance(a, (str, torch.device))]
            dtypes = [a for a in args[1:] if isinstance(a, torch.dtype)]
            target = {"device": devices[0] if devices else None}
            target["dtype"] = dtypes[0] if dtypes else None
            return _aten._to_copy.default(args[0], **target)
        return function(*args, **kwargs)


def _item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Returns `tensor[index]`."""
    entries = index if isinstance(index, tuple) else (index,)
    num_axes = sum(entry is not None and entry is not Ellipsis for entry in entries)
    rank, axis, chosen = tensor.dim(), 0, {}
    for entry in entries:
        if entry is Ellipsis:
            axis += rank - num_axes
        elif entry is None:
            tensor = tensor.unsqueeze(axis)
            axis += 1
        elif isinstance(entry, slice):
            bounds = entry.start, entry.stop, entry.step or 1
            tensor = _aten.slice.Tensor(tensor, axis, *bounds)
            axis += 1
        elif isinstance(entry, torch.Tensor):
            if entry.dtype == torch.bool:
                raise RefusedError("the host waits for the device: the shape depends on a mask")
            chosen[axis] = entry
            axis += 1
        else:
            tensor = tensor.select(axis, int(entry))
    if chosen:
        places = [chosen.get(axis) for axis in range(max(chosen) + 1)]
        return _aten.index.Tensor(tensor, places)
    return tensor


class StrictDevice(TorchDispatchMode):
    """The stand-in, within `entered`.

    Attributes:
        counts: what was done since they were last replaced.
        peaks: of each captured graph, the most bytes that it had allocated at once.
        versions: of kernels that were launched so far.
        is_serving: whether new versions are refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.peaks: list[int] = []
        self.versions: set[Version] = set()
        self.is_serving = False
        self._capture: _Capture | None = None

    @contextmanager
    def entered(self) -> Iterator["StrictDevice"]:
        """Makes the engine believe in a GPU."""
        patches = [
            mock.patch.object(InterpretedFunction, "run", self._launcher()),
            mock.patch.object(launch, "_load_table", self._load_table),
            mock.patch.object(attention, "_num_processors", return_value=_NUM_PROCESSORS),
            mock.patch.object(launcher, "resolve_device", return_value=GPU),
            mock.patch.object(launcher, "check_launch"),
            mock.patch.object(launcher, "used_bytes", return_value=0),
            mock.patch.object(launcher, "check_kv_cache_dtype", return_value=None),
            mock.patch.object(launcher, "check_same_engine"),
            mock.patch.object(device_steps, "CudaGraphRecorder", return_value=self.record),
            mock.patch.object(device_steps, "_free_bytes", return_value=0),
            mock.patch.object(loader, "draw_weights", return_value=None),
            mock.patch.object(loader, "dummy_fingerprint", return_value=b"dummy"),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor)),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
            mock.patch.object(torch.cuda, "Event"),
            mock.patch.object(torch.cuda, "Stream", self._refuse_stream),
            mock.patch.object(torch.cuda, "stream", self._refuse_stream),
        ]
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(self)
            stack.enter_context(_WithoutGuards())
            yield self

    def steps(self, path: Path, ranks: EngineRanks | None = None, **flags: object) -> DeviceSteps:
        """Returns the steps of a checkpoint's model with dummy weights, over a dummy pool."""
        config = EngineConfig(model=str(path), device="cuda", load_format="dummy", **flags)
        return self._steps_of(launcher.Launcher(config, progress=False, ranks=ranks))

    @staticmethod
    def _steps_of(launched: launcher.Launcher) -> DeviceSteps:
        steps = launched._make_steps(*launched.trials()._dummy_pool())
        assert isinstance(steps, DeviceSteps)
        return steps

    def warm_up(self, steps: DeviceSteps) -> None:
        """Warms steps up; from then on, new versions of kernels are refused."""
        with mock.patch.object(DeviceSteps, "_run_and_wait", _run):
            steps.warm_up()
        self.is_serving = True

    def run(self, steps: DeviceSteps, batch: Any) -> Counts:
        """Launches a step, which nobody reads; returns what it did."""
        self.counts.__init__()  # type: ignore[misc]
        _run(steps, batch)
        return self.counts

    def record(self, run: Callable[[], torch.Tensor]) -> RecordedStep:
        """Captures what a function launches, as `CudaGraphRecorder` does."""
        capture, before = _Capture(), set(self.versions)
        self._capture = capture
        try:
            output = run()
        finally:
            self._capture = None
        if capture.alive:
            gc.collect()
        kept = [tensor for ref in capture.alive.values() if (tensor := ref()) is not None]
        if kept:
            raise RefusedError(f"tensors live on in the graph's pool: {[t.shape for t in kept]}")
        if self.versions != before:
            raise RefusedError(f"compiled in a capture: {sorted(map(str, self.versions - before))}")
        self.peaks.append(capture.peak_bytes)
        return _Replayed(output, self.counts)

    @staticmethod
    def _load_table(*_: object) -> launch.LaunchTable:
        return launch.load_launch_table("NVIDIA H200")

    def _refuse_stream(self, *_: object) -> Any:
        raise RefusedError("steps launch on one stream")

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._capture is not None:
            raise RefusedError("pinned memory is allocated in a capture")
        return tensor

    def _launcher(self) -> Callable[..., None]:
        def run(function: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> None:
            self.counts.launches += 1
            tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
            if any(tensor.device.type != "cuda" for tensor in tensors):
                raise RefusedError(f"{function.fn.__name__} gets a tensor of the CPU")
            version = kernel_version(function, args, kwargs, _is_aligned)
            if self.is_serving and version not in self.versions:
                raise RefusedError(f"compiled while serving: {version}")
            self.versions.add(version)

        return run

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if function in _READS and any(tensor.device.type == "cuda" for tensor in inputs):
            raise RefusedError(f"the host waits for the device: {function}")
        result = function(*args, **kwargs)
        outputs = _tensors(result)
        self._count(function, inputs, outputs)
        if self._capture is not None:
            if any(tensor.device.type != "cuda" for tensor in (*inputs, *outputs)):
                raise RefusedError(f"{function} gets or returns a tensor of the CPU in a capture")
            known = {_memory(tensor) for tensor in inputs}
            for tensor in outputs:
                if _memory(tensor) not in known:
                    known.add(_memory(tensor))
                    self._capture.allocated(tensor)
        return result

    def _count(
        self, function: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        is_on_gpu = [tensor.device.type == "cuda" for tensor in inputs]
        if not any(is_on_gpu) and not any(tensor.device.type == "cuda" for tensor in outputs):
            return
        if not all(is_on_gpu) and function in (_aten.copy_.default, _aten._to_copy.default):
            # `copy_` into a tensor of the CPU brings results to the host.
            self.counts.sent += function is _aten._to_copy.default or is_on_gpu[0]
            return
        has_launch = {_memory(t) for t in outputs}.isdisjoint({_memory(t) for t in inputs})
        self.counts.launches += has_launch or function._schema.is_mutable


def _run(steps: DeviceSteps, batch: Any) -> None:
    steps.update(batch)
    steps.launch(batch)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the address is divisible by 16, as that of all memory of a GPU is."""
    return tensor.storage_offset() * tensor.itemsize % 16 == 0
