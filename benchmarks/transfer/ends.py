"""`Ends`: who publishes blocks and who loads them, and whether what came is what was sent."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.transfer.child import Child
from benchmarks.transfer.connector_end import RefusedError
from benchmarks.transfer.end_host import EndHost
from kvstore.layout import KvLayout

__all__ = ["Ends", "open_ends"]


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
