"""Operations of several ranks on numbers that every rank can compute, and a process for a rank.

`python -m tests.support.rank_cases FILE RANK SIZE` computes the cases that rank 0 sends.
"""

import os
import pickle
import sys
import threading
from dataclasses import dataclass

import torch

import kernels
from kernels import RankGroup, WeightUse
from kernels.library.commands import library
from kernels.native.ranks import SharedMemoryRanks


@dataclass(frozen=True)
class ReduceCase:
    """Sums over ranks; `residual_stride` is the residual's, None for no residual."""

    num_rows: int
    num_columns: int
    dtype: torch.dtype
    has_bias: bool
    residual_stride: int | None
    scale: float = 1.0

    def partial(self, rank: int) -> torch.Tensor:
        return _numbers(rank, self.num_rows, self.num_columns)

    @property
    def bias(self) -> torch.Tensor | None:
        return _numbers(100, self.num_columns).to(self.dtype) if self.has_bias else None

    @property
    def residual(self) -> torch.Tensor | None:
        if self.residual_stride is None:
            return None
        wide = _numbers(101, self.num_rows, self.residual_stride).to(self.dtype)
        return wide[:, : self.num_columns]

    def run(self, ranks: RankGroup) -> torch.Tensor:
        partial = self.partial(ranks.rank)
        return kernels.reduce_ranks(
            partial, ranks, self.bias, self.residual, dtype=self.dtype, scale=self.scale
        )


@dataclass(frozen=True)
class GatherCase:
    """Columns of several ranks."""

    num_rows: int
    num_columns: int

    def whole(self) -> torch.Tensor:
        return _numbers(0, self.num_rows, self.num_columns)

    def run(self, ranks: RankGroup) -> torch.Tensor:
        part = self.whole()[:, ranks.cut(self.num_columns).slice].contiguous()
        return kernels.gather_columns(part, ranks, self.num_columns)


@dataclass(frozen=True)
class EmbedCase:
    """An embedding whose tokens the ranks share."""

    num_tokens: int
    width: int
    dtype: torch.dtype
    use: WeightUse

    def table(self) -> torch.Tensor:
        return _numbers(0, self.num_tokens, self.width).to(self.dtype)

    def ids(self) -> torch.Tensor:
        return torch.randint(0, self.num_tokens, (37,), generator=torch.Generator().manual_seed(1))

    def run(self, ranks: RankGroup) -> torch.Tensor:
        cut = ranks.cut(self.num_tokens)
        weight = kernels.make_weight(
            cut.size, self.width, self.dtype, torch.device("cpu"), self.use
        )
        weight.rows(0, cut.size).copy_(self.table()[cut.slice])
        partial = kernels.embed_part(self.ids(), weight, cut.start)
        return kernels.reduce_ranks(partial, ranks, dtype=self.dtype)


def _numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    """Computes cases until standard input ends."""
    file, rank, size = map(int, sys.argv[1:])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    native = library()
    assert native is not None
    ranks = SharedMemoryRanks(native, file, rank, size)
    while True:
        pickle.loads(ranks.receive(waits_forever=True)).run(ranks)


if __name__ == "__main__":
    main()
