"""`Ends`: a process that publishes blocks, and one that loads them.

Both processes are forked from one that has imported what they need and has started no thread, so
that a dozen of them start in a second.
"""

import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Self

from benchmarks.transfer.end_host import EndHost, TransferRefusedError
from kvstore.layout import KvLayout

__all__ = ["Child", "ChildError", "Ends", "open_ends"]

_PRELOADED = [
    "benchmarks.transfer.end_host",
    "engine.runtime.model_runner",
    "transformers.models.auto.configuration_auto",
    "transformers.models.llama.configuration_llama",
    "kvstore.mover.copies",
    "kvstore.peer.worker",
    "kvstore.stores.file.store",
    "kvstore.stores.redis.store",
    "kvstore.stores.shm.store",
]
"""Modules that are imported before anything is forked. None of them starts a thread.

Engines import them all. The model's are no use here, but while they load, glibc's malloc learns to
keep large blocks; before, it returns the memory of each 1 MiB message to the system at once, which
made loads by gRPC up to a third slower than an engine's.
"""
_ANSWER_S = 300.0
_STOP_S = 20.0


class ChildError(RuntimeError):
    """A method failed in its process, or the process did not answer."""


class Child:
    """An object in a process of its own, and its methods.

    Args:
        make: a function that pickle finds by its name. It returns the object, which has `close`.
        arguments: the arguments of `make`.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method in the process; returns its result.

        Raises:
            ChildError: the method raised an error, or takes too long.
        """
        self._pipe.send((method, arguments))
        if not self._pipe.poll(_ANSWER_S):
            raise ChildError(f"{method} has not ended for {_ANSWER_S:g} s")
        try:
            error, answer = self._pipe.recv()
        except EOFError:
            raise ChildError(f"the process ended during {method}") from None
        if error:
            raise ChildError(f"{method}: {error}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pipe.close()  # this ends the process
        self._process.join(_STOP_S)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served = make(*arguments)
    try:
        while True:
            method, method_arguments = pipe.recv()
            try:
                answer = ("", getattr(served, method)(*method_arguments))
            except Exception as error:
                answer = (f"{type(error).__name__}: {error}", None)
            pipe.send(answer)
    except (EOFError, OSError):
        pass  # the other end of the pipe is closed
    finally:
        served.close()


class Ends:
    """A publisher, whose pool has random blocks, and a reader, whose pool is empty.

    Args:
        publisher: the publisher's process.
        reader: the reader's process. It is the publisher's where processes cannot share the
            connector.
        num_blocks: blocks of either side.
        shift: what to add to a block of the publisher for the reader's copy of it.
    """

    def __init__(self, publisher: Child, reader: Child, num_blocks: int, shift: int) -> None:
        self.publisher = publisher
        self.reader = reader
        self._shift = shift
        self._sent = publisher.call("digests", range(num_blocks))
        self._order = random.Random(0).sample(range(num_blocks), num_blocks)
        self._at = 0

    def take_blocks(self, count: int) -> list[int]:
        """Returns the publisher's blocks for the next move, scattered over the pool.

        No cache holds them, and the reader's blocks are empty.
        """
        if self._at + count > len(self._order):
            self.reader.call("clear", self.reader_ids(self._order[: self._at]))
            self._at = 0
        taken = self._order[self._at : self._at + count]
        self._at += count
        return taken

    def reader_ids(self, block_ids: Sequence[int]) -> list[int]:
        """Returns the reader's blocks for copies of the publisher's."""
        return [block + self._shift for block in block_ids]

    def check(self, block_ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Compares the digests of what arrived with those of the publisher's blocks.

        Raises:
            TransferRefusedError: they differ.
        """
        if [self._sent[block] for block in block_ids] != list(digests):
            raise TransferRefusedError("the bytes that arrived are not those that were sent")

    def check_landed(self, block_ids: Sequence[int]) -> None:
        """Does the same as `check`, with the blocks in the reader's pool."""
        self.check(block_ids, self.reader.call("digests", self.reader_ids(block_ids)))


@contextmanager
def open_ends(layout: KvLayout, num_blocks: int, *, is_shared: bool) -> Iterator[Ends]:
    """Starts both ends: in two processes if processes can share the connector, else in one."""
    with ExitStack() as stack:
        if is_shared:
            publisher = stack.enter_context(Child(EndHost, layout, num_blocks, num_blocks))
            reader = stack.enter_context(Child(EndHost, layout, num_blocks, 0))
            yield Ends(publisher, reader, num_blocks, shift=0)
        else:
            both = stack.enter_context(Child(EndHost, layout, 2 * num_blocks, num_blocks))
            yield Ends(both, both, num_blocks, shift=num_blocks)
