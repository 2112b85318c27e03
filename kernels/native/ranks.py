"""Ranks of one machine, which exchange everything through shared memory (src/rank_group.h)."""

import threading

import torch
from typing_extensions import override

from kernels import reference
from kernels.dispatch import NATIVE
from kernels.library import commands
from kernels.library.commands import NativeKernels
from kernels.native.ops import is_vector, run_command
from kernels.native.packed_weight import ELEMENT_TYPES
from kernels.ranks import RankGroup

__all__ = ["MAX_RANKS", "SharedMemoryRanks", "reduce_ranks"]

MAX_RANKS = 64


class SharedMemoryRanks(RankGroup):
    """A rank of a group on one machine.

    The memory is that of a file without a name, so it is gone once all ranks have ended, also if
    they are killed.

    Args:
        library: the native library.
        file: descriptor of the file, which is made as long as necessary; it may be closed
            afterwards.
        rank: see `RankGroup`.
        size: see `RankGroup`.

    Raises:
        MemoryError: the system refuses the memory.
    """

    def __init__(self, library: NativeKernels, file: int, rank: int, size: int) -> None:
        self.rank, self.size, self.num_local = rank, size, size
        self._library = library
        self._lock = threading.Lock()  # of `abort`, which any thread may call, and `close`
        self._address: int | None = library.open_ranks(file, rank, size)
        if self._address is None:
            raise MemoryError("the memory that ranks share could not be mapped")

    @property
    def address(self) -> int:
        """Address of the library's object."""
        assert self._address is not None, "the group is closed"
        return self._address

    @override
    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return reduce_ranks(partial, self, dtype=torch.float32)

    @override
    def gather_columns(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        assert _is_host_matrix(part)
        assert part.shape[1] == self.cut(num_columns).size
        out = torch.empty((len(part), num_columns)) if self.rank == 0 else None
        run_command(
            commands.GATHER_COLUMNS,
            self.address,
            part.data_ptr(),
            len(part),
            num_columns,
            0 if out is None else out.data_ptr(),
            keep=(part,) if out is None else (part, out),
        )
        return part if out is None else out

    @override
    def limit_waits(self, timeout_s: float) -> None:
        self._library.limit_rank_waits(self.address, timeout_s)

    @override
    def send(self, data: bytes) -> None:
        self._library.send_to_ranks(self.address, data)

    @override
    def receive(self, *, waits_forever: bool = False) -> bytes:
        return self._library.receive_from_rank_0(self.address, waits_forever=waits_forever)

    @override
    def abort(self) -> None:
        with self._lock:
            if self._address is not None:
                self._library.abort_ranks(self._address)

    @override
    def close(self) -> None:
        with self._lock:
            if self._address is not None:
                self._library.close_ranks(self._address)
                self._address = None


@NATIVE.implements(reference.reduce_ranks)
def reduce_ranks(
    partial: torch.Tensor,
    ranks: RankGroup,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> torch.Tensor:
    if not isinstance(ranks, SharedMemoryRanks):
        return reference.reduce_ranks(partial, ranks, bias, residual, dtype=dtype, scale=scale)
    assert _is_host_matrix(partial)
    assert bias is None or is_vector(bias, partial.shape[1], dtype)
    if residual is not None:
        assert residual.dtype == dtype
        assert residual.shape == partial.shape
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
    out = torch.empty(partial.shape, dtype=dtype)
    run_command(
        commands.REDUCE_RANKS,
        ELEMENT_TYPES[dtype],
        ranks.address,
        partial.data_ptr(),
        *partial.shape,
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        scale,
        out.data_ptr(),
        keep=(partial, out) if residual is None else (partial, residual, out),
    )
    return out


def _is_host_matrix(values: torch.Tensor) -> bool:
    """Returns whether the library can read the tensor as rows of floats without gaps."""
    return values.is_cpu and values.dtype == torch.float32 and values.is_contiguous()
