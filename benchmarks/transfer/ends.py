"""Objects in processes of their own, whose methods are called from here.

The processes are forked from one that has imported what they need and in which nothing has
begun, so that a dozen of them start in a second.

`Ends`: who publishes blocks and who loads them, and whether what came is what was sent.
"""

import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Self

from benchmarks.transfer.connector_end import RefusedError
from benchmarks.transfer.end_host import EndHost
from kvstore.layout import KvLayout

__all__ = ["Child", "ChildError", "Ends", "open_ends", "start_process"]

_PRELOADED = [
    "benchmarks.transfer.end_host",
    "kvstore.mover.copies",
    "kvstore.peer.worker",
    "kvstore.stores.file.store",
    "kvstore.stores.redis.store",
    "kvstore.stores.shm.store",
]
"""What is imported before anything is forked. None of it starts a thread."""
_ANSWER_S = 300.0
_STOP_S = 20.0


class ChildError(RuntimeError):
    """A method failed in its process, or the process did not answer."""


def start_process(
    target: Callable[..., None], *arguments: Any
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Starts `target(pipe, *arguments)` in a process of its own.

    Returns:
        The process, and this end of the pipe.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


class Child:
    """An object that `make` makes in another process, and its methods.

    Args:
        make: a function that pickle finds by its name; what it makes has `close`.
        arguments: of it.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._process, self._pipe = start_process(_serve, make, arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method there; returns what it returns.

        Raises:
            ChildError: it raised, or does not answer.
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
        self._pipe.close()  # which ends it
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
        pass  # nobody asks any more
    finally:
        served.close()


class Ends:
    """A publisher, whose pool has random blocks, and a reader, whose pool is empty.

    Args:
        publisher: the process of the one.
        reader: of the other; the same where both have to share it.
        num_blocks: on either side.
        shift: of a reader's block beside the publisher's that it is the copy of.
    """

    def __init__(self, publisher: Child, reader: Child, num_blocks: int, shift: int) -> None:
        self.publisher = publisher
        self.reader = reader
        self._shift = shift
        self._sent = publisher.call("digests", range(num_blocks))
        self._order = random.Random(0).sample(range(num_blocks), num_blocks)
        self._at = 0

    def take(self, count: int) -> list[int]:
        """The publisher's blocks for the next move, scattered as an engine's are.

        They were not touched for long, and the reader's are empty: only a move can fill them.
        """
        if self._at + count > len(self._order):
            self.reader.call("clear", self.reader_ids(self._order[: self._at]))
            self._at = 0
        taken = self._order[self._at : self._at + count]
        self._at += count
        return taken

    def reader_ids(self, block_ids: Sequence[int]) -> list[int]:
        """Where the reader puts blocks of the publisher."""
        return [block + self._shift for block in block_ids]

    def check(self, block_ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Compares what came of the publisher's blocks with what was sent.

        Raises:
            RefusedError: it differs.
        """
        if [self._sent[block] for block in block_ids] != list(digests):
            raise RefusedError("the bytes that arrived are not those that were sent")

    def check_landed(self, block_ids: Sequence[int]) -> None:
        """As `check`, of what lies in the reader's pool."""
        self.check(block_ids, self.reader.call("digests", self.reader_ids(block_ids)))


@contextmanager
def open_ends(layout: KvLayout, num_blocks: int, *, is_shared: bool) -> Iterator[Ends]:
    """Starts both, in a process each, or where that cannot be in one."""
    with ExitStack() as stack:
        if is_shared:
            publisher = stack.enter_context(Child(EndHost, layout, num_blocks, num_blocks))
            reader = stack.enter_context(Child(EndHost, layout, num_blocks, 0))
            yield Ends(publisher, reader, num_blocks, shift=0)
        else:
            both = stack.enter_context(Child(EndHost, layout, 2 * num_blocks, num_blocks))
            yield Ends(both, both, num_blocks, shift=num_blocks)
