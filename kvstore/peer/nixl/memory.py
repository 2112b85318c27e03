"""`AgentMetadata`: metadata that transports exchange. `MemoryMap`: lookup of registered memory.

Metadata on the wire: a length of 4 bytes, that many bytes of JSON, and the
metadata of nixl's agent.
"""

import ctypes
import errno
import json
import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.peer.transport import RangeTable, TransferError

__all__ = [
    "TOKEN_BYTES",
    "AgentMetadata",
    "DescribedRanges",
    "MemoryMap",
    "MemoryProbe",
    "Region",
    "machine_id",
]

TOKEN_BYTES = 16
"""Length of the random bytes that readers try to read."""

_LENGTH = struct.Struct(">I")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Returns an id of the running kernel, the same in all containers of a machine."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory.

    Attributes:
        address: of the first byte.
        num_bytes: length.
        device: "cpu" or a GPU such as "cuda:0".
    """

    address: int
    num_bytes: int
    device: str

    @property
    def is_on_gpu(self) -> bool:
        """Whether it is memory of a GPU."""
        return self.device != "cpu"

    @property
    def device_id(self) -> int:
        """Index of the GPU; 0 for host memory."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def kind(self) -> str:
        """Name of the memory type in nixl."""
        return "VRAM" if self.is_on_gpu else "DRAM"


class MemoryProbe:
    """Random bytes of this process; peers read them to find out whether they can."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._bytes = ctypes.create_string_buffer(self.token, TOKEN_BYTES)
        self.address = ctypes.addressof(self._bytes)


@dataclass(frozen=True, slots=True)
class AgentMetadata:
    """Metadata of one process's transport, which others need to read its memory.

    Attributes:
        pid: process id, in the process's own PID namespace.
        machine: `machine_id` of its machine.
        probe_address: address of its `MemoryProbe`.
        probe_token: the bytes at that address.
        transports: its UCX_TLS; empty if that is not set.
        regions: its registered memory, the probe's among them.
        agent: the metadata of nixl's agent.
    """

    pid: int
    machine: str
    probe_address: int
    probe_token: bytes
    transports: str
    regions: tuple[Region, ...]
    agent: bytes

    def to_bytes(self) -> bytes:
        """Returns the wire form."""
        fields = {
            "pid": self.pid,
            "machine": self.machine,
            "probe_address": self.probe_address,
            "probe_token": self.probe_token.hex(),
            "transports": self.transports,
            "regions": [asdict(region) for region in self.regions],
        }
        text = json.dumps(fields).encode()
        return _LENGTH.pack(len(text)) + text + self.agent

    @classmethod
    def from_bytes(cls, data: bytes) -> "AgentMetadata":
        """Parses the wire form.

        Raises:
            TransferError: the bytes are malformed; settled.
        """
        try:
            (length,) = _LENGTH.unpack_from(data)
            end = _LENGTH.size + length
            fields = json.loads(data[_LENGTH.size : end])
            return cls(
                pid=int(fields["pid"]),
                machine=str(fields["machine"]),
                probe_address=int(fields["probe_address"]),
                probe_token=bytes.fromhex(fields["probe_token"]),
                transports=str(fields["transports"]),
                regions=tuple(Region(**region) for region in fields["regions"]),
                agent=data[end:],
            )
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"the peer's metadata is malformed: {error!r}"
            raise TransferError(message, is_settled=True) from error

    def obstacle(self) -> str:
        """Returns the likely reason why this process cannot read that one's memory."""
        for name, transports in (("its", self.transports), ("own", os.environ.get("UCX_TLS"))):
            if transports:
                return f"{name} UCX_TLS={transports} may forbid what reads need"
        if any(region.is_on_gpu for region in self.regions):
            return "its pool is GPU memory, which UCX cannot read from here"
        if self.machine != machine_id():
            devices = os.environ.get("UCX_NET_DEVICES")
            limit = f", or not by own UCX_NET_DEVICES={devices}" if devices else ""
            return f"it runs on another machine, without RDMA in between{limit}"
        error = self._try_system_call()
        if error == errno.ESRCH:
            return "it runs in another PID namespace"
        if error:
            return f"process_vm_readv fails: {os.strerror(error)} (it takes the right to trace)"
        return "UCX finds no way to read it"

    def _try_system_call(self) -> int:
        """Reads the probe by `process_vm_readv`; returns the error number, 0 for success."""
        buffer = ctypes.create_string_buffer(TOKEN_BYTES)
        local = _IoVector(ctypes.addressof(buffer), TOKEN_BYTES)
        remote = _IoVector(self.probe_address, TOKEN_BYTES)
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        read.restype = ctypes.c_ssize_t
        if read(self.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) < 0:
            error = ctypes.get_errno()
            return errno.ESRCH if error == errno.EFAULT else error
        return 0 if buffer.raw == self.probe_token else errno.ESRCH


class _IoVector(ctypes.Structure):
    """C's `struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class DescribedRanges:
    """Ranges with the kind of memory that they lie in.

    Attributes:
        table: the ranges, with the GPUs of their regions.
        is_on_gpu: `[ranges]` bool.
    """

    table: RangeTable
    is_on_gpu: NDArray[np.bool_]


class MemoryMap:
    """Finds the regions of ranges. One thread may read it while another adds a region.

    Args:
        regions: the first regions.

    Attributes:
        regions: all regions, in the order in which they were added.
    """

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self.regions: tuple[Region, ...] = ()
        self._columns = np.empty((4, 0), np.uint64)
        self._set(regions)

    def add(self, region: Region) -> None:
        """Adds a region."""
        self._set((*self.regions, region))

    def describe(self, ranges: RangeTable) -> DescribedRanges:
        """Returns the ranges with the devices of their regions.

        Raises:
            TransferError: a range does not lie in one region; settled.
        """
        starts, sizes, devices, on_gpu = self._columns
        table = ranges.copy()
        index = starts[1:].searchsorted(table[:, 0], side="right")
        offsets = table[:, 0] - starts[index]  # wraps to a huge number below the first region
        fits = (offsets <= sizes[index]) & (table[:, 1] <= sizes[index] - offsets)
        if not fits.all():
            address, num_bytes, _ = ranges[int(fits.argmin())].tolist()
            message = f"{num_bytes} bytes at {address:#x} are not registered"
            raise TransferError(message, is_settled=True)
        table[:, 2] = devices[index]
        return DescribedRanges(table, on_gpu[index].astype(np.bool_))

    def _set(self, regions: Sequence[Region]) -> None:
        empty = Region(0, 0, "cpu")  # an address below all regions finds this one
        rows = sorted(
            (region.address, region.num_bytes, region.device_id, region.is_on_gpu)
            for region in (*regions, empty)
        )
        self._columns = np.array(rows, np.uint64).T.copy()
        self.regions = tuple(regions)
