"""`NcclRanks`: ranks with a GPU each, which divide each layer and add up through NCCL.

The library is called directly instead of through `torch.distributed`, whose own threads watch
calls and end the process after times of their own. Here a call that hangs is ended by `abort`,
which any thread may call, and calls are captured in CUDA graphs like kernels.
"""

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from typing_extensions import override

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.runtime.device import current, resolve_device
from engine.runtime.ranks.linked import LinkedGroup
from kernels.ranks import DeviceRankGroup, RanksLostError

__all__ = ["NcclRanks", "open_group"]

# Values of nccl.h.
_SUM = 0
_ELEMENT_TYPES = {torch.int64: 4, torch.float32: 7}
_ID_BYTES = 128

_MEETING_S = 300.0
"""How long a rank waits for its group's name, which rank 0 sends before it loads."""
_ABORT_S = 2.0
"""How long NCCL's abort is waited for. It ends kernels at once, but returns only when no CUDA graph
has calls of the group any more."""
_LOCK_S = 1.0
"""How long `abort` waits for a call on the host: one that hangs ends by the abort."""
_POLL_S = 50e-6
_CHECK_S = 0.1
"""Time between two looks at whether another rank is lost."""

_POINTER, _COUNT, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT),
    "ncclAllReduce": (_POINTER, _POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _COUNT, _INT, _POINTER, _POINTER),
    "ncclBroadcast": (_POINTER, _POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER),
    "ncclCommAbort": (_POINTER,),
}


def open_group(
    config: EngineConfig,
    rank: int,
    num_local: int,
    local_rank: int,
    steps: Mapping[int, Connection],
) -> "NcclRanks | None":
    """Opens a rank's access to the others of its stage; returns None if there is no other.

    Args:
        config: of the engine.
        rank: number of the rank among all of the engine.
        num_local: see `EngineRanks`.
        local_rank: see `EngineRanks`.
        steps: rank 0's connections to the others by rank; another one's to rank 0.

    Raises:
        ConfigurationError: there is no NCCL.
        RanksLostError: NCCL fails, or another rank is lost or has not answered in time.
    """
    width = config.tensor_parallel_size
    if width == 1:
        return None
    library, device = _load_nccl(), resolve_device(config.device, local_rank)
    name = _receive_name(steps[0]) if rank > 0 else _send_names(library, config, steps)
    sizes = width, num_local, local_rank
    return NcclRanks(rank % width, *sizes, device, list(steps.values()), library, name)


def _load_nccl() -> Any:
    """Returns NCCL's library, which torch's packages for GPUs bring along.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise ConfigurationError(
            f"--tensor-parallel-size on GPUs needs NCCL, which torch for GPUs installs: {error}"
        ) from error
    for name, types in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, _INT
    library.ncclGetErrorString.argtypes = (_INT,)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _send_names(library: Any, config: EngineConfig, steps: Mapping[int, Connection]) -> bytes:
    """Makes NCCL's name of each stage's group, and sends it to the group's ranks; returns that of
    rank 0's. NCCL lets the ranks of a group meet in the process that has made its name.

    Raises:
        RanksLostError: NCCL fails, or another rank is lost.
    """
    width, names = config.tensor_parallel_size, list[bytes]()
    for _ in range(config.pipeline_parallel_size):
        name = _UniqueId()
        if status := library.ncclGetUniqueId(ctypes.byref(name)):
            raise RanksLostError(f"NCCL fails: {_reason(library, status)}")
        names.append(bytes(name))
    try:
        for rank, link in steps.items():
            link.send_bytes(names[rank // width])
    except OSError as error:
        raise RanksLostError(f"a rank has ended: {error}") from error
    return names[0]


def _receive_name(link: Connection) -> bytes:
    """Returns NCCL's name of this rank's group, which rank 0 sends.

    Raises:
        RanksLostError: rank 0 is lost, or has not answered in time.
    """
    try:
        if link.poll(_MEETING_S):
            return link.recv_bytes(_ID_BYTES)
    except (OSError, EOFError) as error:
        raise RanksLostError(f"rank 0 is lost: {error}") from error
    raise RanksLostError("rank 0 has not answered in time")


class NcclRanks(LinkedGroup, DeviceRankGroup):
    """A rank of a group that adds up through NCCL, on the current stream of its GPU. The ranks meet
    in NCCL at their first operation.

    Args:
        rank: see `RankGroup`.
        size: see `RankGroup`.
        num_local: see `RankGroup`.
        local_rank: see `EngineRanks`.
        device: the GPU.
        steps: see `LinkedGroup`.
        library: NCCL's.
        name: NCCL's name of the group, the same on all its ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        num_local: int,
        local_rank: int,
        device: torch.device,
        steps: Sequence[Connection],
        library: Any,
        name: bytes,
    ) -> None:
        super().__init__(rank, size, num_local, steps)
        self.local_rank, self._name = local_rank, name
        self._device, self._library = device, library
        self._lock = threading.Lock()  # of `_comm`: any thread may call `abort`
        self._aborting = threading.Lock()  # `abort` may go on without the other lock
        self._comm: int | None = None

    @override
    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Adds up the tensors in place, in NCCL's order."""
        if partial.numel():
            place = partial.data_ptr()
            self._call("ncclAllReduce", place, place, partial.numel(), _type(partial), _SUM)
        return partial

    @override
    def gather_columns(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        sent = self._pad_columns(part, num_columns).contiguous()
        received = sent.new_empty((self.size, *sent.shape))
        if sent.numel():
            places = sent.data_ptr(), received.data_ptr()
            self._call("ncclAllGather", *places, sent.numel(), _type(sent))
        return part if self.rank else self._join_columns(received, num_columns)

    @override
    def broadcast(self, values: torch.Tensor) -> None:
        place = values.data_ptr()
        self._call("ncclBroadcast", place, place, values.numel(), _type(values), 0)

    @override
    def wait(self, is_done: Callable[[], bool]) -> None:
        self._wait(is_done, self._limit_s)
        self._check_lost()  # an operation that was aborted has no results

    @override
    def abort(self) -> None:
        super().abort()
        with self._aborting:
            has_lock = self._lock.acquire(timeout=_LOCK_S)
            comm, self._comm = self._comm, None
            if has_lock:
                self._lock.release()
        if comm is not None:
            abort = self._library.ncclCommAbort  # ends calls that wait for other ranks
            aborting = threading.Thread(target=abort, args=(comm,), daemon=True)
            aborting.start()
            aborting.join(_ABORT_S)

    @override
    def close(self) -> None:
        self.abort()

    def _wait(self, is_done: Callable[[], bool], limit_s: float | None) -> None:
        start = checked_at = time.monotonic()
        while not is_done():
            now = time.monotonic()
            if now - checked_at > _CHECK_S:
                checked_at = now
                self._check_lost()
                if any(map(_has_ended, self._steps)):
                    raise self._lost("another rank has ended")
            if limit_s is not None and now - start > limit_s:
                raise self._lost("another rank has not answered in time")
            time.sleep(_POLL_S)

    def _check_lost(self) -> None:
        if self._is_lost:
            raise RanksLostError("another rank has ended")

    def _meet(self) -> int:
        """Joins the group; returns NCCL's handle of it."""
        name = _UniqueId.from_buffer_copy(self._name)
        comm, met = _POINTER(), list[int]()

        def join() -> None:
            with current(self._device):
                arguments = ctypes.byref(comm), self.size, name, self.rank
                met.append(self._library.ncclCommInitRank(*arguments))

        # NCCL waits until all ranks have loaded, and does not notice one that is lost.
        threading.Thread(target=join, name="baton-nccl", daemon=True).start()
        self._wait(lambda: bool(met), self._limit_s)
        self._check(met[0])
        assert comm.value is not None
        return comm.value

    def _call(self, name: str, *arguments: int) -> None:
        """Launches an operation on the current stream."""
        self._check_lost()
        if self._comm is None:
            comm = self._meet()
            with self._lock:
                self._comm = comm
        with self._lock:
            self._check_lost()
            launch = getattr(self._library, name)
            status = launch(*arguments, self._comm, _current_stream(self._device))
        self._check(status)

    def _check(self, status: int) -> None:
        if status:
            raise self._lost(f"another rank is lost: {_reason(self._library, status)}")


def _reason(library: Any, status: int) -> str:
    reason: bytes = library.ncclGetErrorString(status)
    return reason.decode()


def _current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _type(values: torch.Tensor) -> int:
    assert values.is_contiguous()
    return _ELEMENT_TYPES[values.dtype]


def _has_ended(link: Connection) -> bool:
    """Returns whether the other side has closed a connection, and has sent nothing before."""
    try:
        with socket.socket(fileno=os.dup(link.fileno())) as end:
            return not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
