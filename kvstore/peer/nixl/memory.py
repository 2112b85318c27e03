"""What agents tell each other of themselves, and which ranges lie in registered memory.

Metadata on the wire: a length of 4 bytes, that many bytes of JSON, and what
nixl says of its agent.
"""

import ctypes
import json
import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.peer.process_end import ProcessEnd
from kvstore.peer.transport import RangeTable, TransferError

__all__ = ["AgentMetadata", "DescribedRanges", "MemoryMap", "MemoryProbe", "Region"]

_LENGTH = struct.Struct(">I")
_TOKEN_BYTES = 16
_RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory.

    Attributes:
        address: of the first byte.
        num_bytes: length.
        device: "cpu" or, say, "cuda:0".
    """

    address: int
    num_bytes: int
    device: str

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU's memory holds it."""
        return self.device != "cpu"

    @property
    def device_id(self) -> int:
        """Of the GPU; 0 for host memory."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def kind(self) -> str:
        """As nixl names it."""
        return "VRAM" if self.is_on_gpu else "DRAM"


class MemoryProbe:
    """Some random bytes of this process, for others to try whether they can read them."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
        self.pid = os.getpid()
        self.address = ctypes.addressof(self._bytes)
        self.token = self._bytes.raw


@dataclass(frozen=True, slots=True)
class AgentMetadata:
    """What one agent says of itself.

    Attributes:
        pid: of its process, where that runs.
        probe_address: where the process has its `MemoryProbe`.
        probe_token: what lies there.
        transports: UCX's that its operator allows; empty for all.
        regions: its registered memory.
        agent: nixl's part.
    """

    pid: int
    probe_address: int
    probe_token: bytes
    transports: str
    regions: tuple[Region, ...]
    agent: bytes

    def to_bytes(self) -> bytes:
        """As it goes to others."""
        fields = {
            "pid": self.pid,
            "probe_address": self.probe_address,
            "probe_token": self.probe_token.hex(),
            "transports": self.transports,
            "regions": [asdict(region) for region in self.regions],
        }
        text = json.dumps(fields).encode()
        return _LENGTH.pack(len(text)) + text + self.agent

    @classmethod
    def from_bytes(cls, data: bytes) -> "AgentMetadata":
        """Reads what another agent sent.

        Raises:
            TransferError: it is no such metadata; settled.
        """
        try:
            (length,) = _LENGTH.unpack_from(data)
            end = _LENGTH.size + length
            fields = json.loads(data[_LENGTH.size : end])
            return cls(
                pid=int(fields["pid"]),
                probe_address=int(fields["probe_address"]),
                probe_token=bytes.fromhex(fields["probe_token"]),
                transports=str(fields["transports"]),
                regions=tuple(Region(**region) for region in fields["regions"]),
                agent=data[end:],
            )
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"the peer's metadata is malformed: {error!r}"
            raise TransferError(message, is_settled=True) from error

    def is_copied_by_kernel(self) -> bool:
        """Whether transfers with the agent's host memory are system calls of whoever asks (CMA).

        Then nothing is under way once the call is over. It is so if the memory can be reached,
        and UCX has no faster way and no orders on either side.
        """
        has_orders = os.environ.get("UCX_TLS") or self.transports
        if has_orders or any(region.is_on_gpu for region in self.regions):
            return False
        has_rdma = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
        return not has_rdma and self._probe() == self.probe_token

    def process_end(self) -> ProcessEnd | None:
        """When the agent's process ends; None where it is not known to be one of this machine."""
        try:
            end = ProcessEnd(self.pid)  # before the probe: it is of whom the probe finds
        except OSError:
            return None
        return end if self._probe() == self.probe_token else None

    def _probe(self) -> bytes | None:
        """What lies at the probe's address in the process of that id here, if it may be read."""
        buffer = ctypes.create_string_buffer(_TOKEN_BYTES)
        own = _IoVector(ctypes.addressof(buffer), _TOKEN_BYTES)
        remote = _IoVector(self.probe_address, _TOKEN_BYTES)
        read = ctypes.CDLL(None).process_vm_readv
        read.restype = ctypes.c_ssize_t
        num_read = read(self.pid, ctypes.byref(own), 1, ctypes.byref(remote), 1, 0)
        return buffer.raw if num_read == _TOKEN_BYTES else None


class _IoVector(ctypes.Structure):
    """C's `struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class DescribedRanges:
    """Ranges as nixl takes them.

    Attributes:
        table: the ranges.
        is_on_gpu: `[ranges]` bool.
    """

    table: RangeTable
    is_on_gpu: NDArray[np.bool_]


class MemoryMap:
    """Registered memory, to find ranges in. Reading it while another thread adds is safe.

    Args:
        regions: to begin with.
    """

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self.regions: tuple[Region, ...] = ()
        self._columns = np.empty((4, 0), np.uint64)
        self._set(regions)

    def add(self, region: Region) -> None:
        """Adds a region; `regions` keep the order in which they came."""
        self._set((*self.regions, region))

    def describe(self, ranges: RangeTable) -> DescribedRanges:
        """Finds each range's region, and the device from that.

        Raises:
            TransferError: a range does not lie in one region; settled.
        """
        starts, sizes, devices, on_gpu = self._columns
        table = ranges.copy()
        index = starts[1:].searchsorted(table[:, 0], side="right")
        offsets = table[:, 0] - starts[index]  # of an address below all regions: huge
        fits = (offsets <= sizes[index]) & (table[:, 1] <= sizes[index] - offsets)
        if not fits.all():
            address, num_bytes, _ = ranges[int(fits.argmin())].tolist()
            message = f"{num_bytes} bytes at {address:#x} are not registered"
            raise TransferError(message, is_settled=True)
        table[:, 2] = devices[index]
        return DescribedRanges(table, on_gpu[index].astype(np.bool_))

    def _set(self, regions: Sequence[Region]) -> None:
        nowhere = Region(0, 0, "cpu")
        rows = sorted(
            (region.address, region.num_bytes, region.device_id, region.is_on_gpu)
            for region in (*regions, nowhere)
        )
        self._columns = np.array(rows, np.uint64).T.copy()
        self.regions = tuple(regions)
