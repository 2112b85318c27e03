"""`baton bench ranks`: what the ranks of one engine exchange through shared memory."""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import TYPE_CHECKING

from baton.common.errors import ConfigurationError
from benchmarks.machine import in_words, name_machine
from benchmarks.output import add_output_args, check_output_args, flags_of, write_report
from benchmarks.report import Report, Table
from engine.batch import ScheduledBatch, ScheduledChunk, TableUpdate

if TYPE_CHECKING:
    from kernels.library.commands import NativeKernels
    from kernels.native.ranks import SharedMemoryRanks

__all__ = ["add_args", "main"]

_SUMS = (768, 4096, 36_864, 262_144)
_REPEATS = 200
_ROUNDS = 15
_PER_CALL = 50  # commands in one call of the library, so that Python's time does not count


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--num-ranks", type=int, default=2, metavar="N", help="processes (default: %(default)s)"
    )
    add_output_args(parser)


def main(args: argparse.Namespace) -> None:
    """Measures the exchanges between the ranks of an engine on this machine: sums, beside the same
    sums of a single rank, which exchanges nothing; and batches, until all ranks have read them.
    """
    check_output_args(args)
    if args.num_ranks < 2:
        raise ConfigurationError(f"--num-ranks is {args.num_ranks}; it must be >= 2")
    sums = [(size, *_time_sums(size, args.num_ranks)) for size in _SUMS]
    batches = [(name, *_time_batch(name, args.num_ranks)) for name in _BATCHES]
    machine = name_machine()
    write_report(
        Report(
            title=f"Exchanges between {args.num_ranks} ranks",
            facts={"machine": in_words(machine), "threads": "one per rank"},
            tables=[
                Table(
                    "Sums of float32 numbers, us",
                    ("numbers", "all ranks", "one rank"),
                    sums,
                    f"Medians of {_ROUNDS} rounds. One rank copies its numbers and reads them.",
                ),
                Table(
                    "Batches, us",
                    ("batch", "bytes", "to all ranks and back"),
                    batches,
                    "With pickling, unpickling and a sum of one number as the answer.",
                ),
            ],
            panels=[],
            results={
                "machine": machine,
                "flags": flags_of(args),
                "sums": sums,
                "batches": batches,
            },
        ),
        args,
    )


def _time_sums(size: int, num_ranks: int) -> tuple[float, float]:
    """Returns the microseconds of a sum over all ranks, and of one rank alone."""
    with _group(num_ranks, "sum", size) as ranks:
        together = _median_us(lambda: _sums(ranks, size), _PER_CALL)
    with _group(1, "sum", size) as ranks:
        alone = _median_us(lambda: _sums(ranks, size), _PER_CALL)
    return together, alone


def _time_batch(name: str, num_ranks: int) -> tuple[int, float]:
    """Returns the bytes of a batch, and the microseconds until all ranks have answered it."""
    import torch

    from engine.runtime.rank_batches import BatchSender

    batch, one = _BATCHES[name], torch.ones(1, 1)
    # Rows that decode as in the batch before are not sent again, so these change each time.
    other = replace(batch, decode_rows=batch.decode_rows[::-1])
    batches = cycle((batch, other))
    with _group(num_ranks, "batch", 0) as ranks:
        sender = BatchSender(ranks)

        def exchange() -> None:
            sender.send(next(batches))
            ranks.all_reduce(one)

        return _num_bytes(batch), _median_us(exchange, 1)


def _num_bytes(batch: ScheduledBatch) -> int:
    from engine.runtime.rank_batches import BatchSender

    messages: list[bytes] = []
    BatchSender(SimpleNamespace(send=messages.append)).send(batch)  # type: ignore[arg-type]
    return len(messages[0])


def _sums(ranks: "SharedMemoryRanks", size: int) -> None:
    """Runs as many sums as `_PER_CALL` says in one call."""
    import torch

    from kernels.library import commands

    partial, out = torch.ones(1, size), torch.empty(1, size)
    packed = commands.REDUCE_RANKS.pack(
        0, ranks.address, partial.data_ptr(), 1, size, 0, 0, 0, out.data_ptr()
    )
    native = commands.library()
    assert native is not None
    native.run(packed * _PER_CALL, _PER_CALL)


def _median_us(call: Callable[[], object], per_call: int) -> float:
    rounds = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(_REPEATS):
            call()
        rounds.append((time.perf_counter() - began) / (_REPEATS * per_call) * 1e6)
    return statistics.median(rounds[1:])


@contextmanager
def _group(num_ranks: int, kind: str, size: int) -> Iterator["SharedMemoryRanks"]:
    """Rank 0 of a group whose other ranks are processes that do the same."""
    from kernels.native.ranks import SharedMemoryRanks

    native = _library()
    file = os.memfd_create("bench-ranks")
    ranks = SharedMemoryRanks(native, file, 0, num_ranks)
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "benchmarks.ranks_command"),
                *map(str, (file, rank, num_ranks, kind, size)),
            ],
            stdin=subprocess.PIPE,
            pass_fds=(file,),
        )
        for rank in range(1, num_ranks)
    ]
    os.close(file)
    try:
        yield ranks
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        ranks.close()


def _library() -> "NativeKernels":
    import kernels
    from kernels.library.commands import library

    native = library()
    if native is None:
        raise ConfigurationError("ranks need the native kernels: see `baton doctor`")
    kernels.set_num_threads(1)
    return native


def _serve(arguments: Sequence[str]) -> None:
    """Does what rank 0 does, in a process that ends with its standard input."""
    import torch

    from engine.runtime.rank_batches import BatchReceiver
    from kernels.native.ranks import SharedMemoryRanks

    *numbers, kind, size = arguments
    file, rank, num_ranks = map(int, numbers)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    ranks = SharedMemoryRanks(_library(), file, rank, num_ranks)
    receiver, one = BatchReceiver(ranks), torch.ones(1, 1)
    while True:
        if kind == "sum":
            _sums(ranks, int(size))
        else:
            receiver.receive()
            ranks.all_reduce(one)


def _decoding(num_rows: int, num_updates: int) -> ScheduledBatch:
    updates = tuple(TableUpdate(row, 0, 7, (row,)) for row in range(num_updates))
    return ScheduledBatch(1, decode_rows=tuple(range(num_rows)), table_updates=updates)


def _prompts(num_prompts: int, length: int) -> ScheduledBatch:
    chunks = tuple(ScheduledChunk(row, tuple(range(length)), 0) for row in range(num_prompts))
    return ScheduledBatch(1, chunks)


_BATCHES = {
    "256 rows decode": _decoding(256, 16),
    "1,024 rows decode": _decoding(1024, 64),
    "8 prompts of 1,024 tokens": _prompts(8, 1024),
}


if __name__ == "__main__":
    _serve(sys.argv[1:])
