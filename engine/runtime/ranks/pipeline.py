"""The ranks of a pipeline: each stage has some of the layers, and its ranks divide each of these.

    rank         stage          reads                    sends
    first one    num_stages-1   hidden states            tokens, batches
    ...
    last one     0              token ids                hidden states

Rank 0 computes the last stage, as it draws tokens from its logits. It sends each batch to all ranks
at once, so the first stage may compute the next batch while later ones compute this one.
"""

import queue
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import BufferTooShort
from multiprocessing.connection import Connection

import torch
from typing_extensions import override

from engine.config import EngineConfig
from engine.runtime.ranks.meeting import END, shut_down
from kernels.ranks import EngineRanks, GroupEndedError, RankGroup, RanksLostError

__all__ = ["PipelineLinks", "PipelineRanks"]

_BATCH, _TOKENS = b"b", b"t"
# Hidden states that wait for a later stage. More would let the first stage run ahead.
_MAX_UNSENT = 2


@dataclass(frozen=True, slots=True)
class PipelineLinks:
    """A rank's connections.

    Attributes:
        steps: rank 0's connections to the others by rank; another one's to rank 0.
        before: to the stage before, which sends hidden states; None for the first stage.
        after: to the stage after; None for the last one.
    """

    steps: Mapping[int, Connection]
    before: Connection | None = None
    after: Connection | None = None

    def all(self) -> Sequence[Connection]:
        """Returns all connections."""
        return [*self.steps.values(), *(link for link in (self.before, self.after) if link)]


class PipelineRanks(EngineRanks):
    """One rank of a pipeline.

    Args:
        rank: number of the rank.
        config: of the engine.
        group: the ranks of the same stage; None if there is no other.
        links: closed with the ranks.
        num_local: number of ranks that share this machine.
        local_rank: number of this rank among them.
    """

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        group: RankGroup | None,
        links: PipelineLinks,
        num_local: int,
        local_rank: int = 0,
    ) -> None:
        self.rank, self.size = rank, config.num_ranks
        self.num_local, self.local_rank = num_local, local_rank
        self.num_stages = config.pipeline_parallel_size
        self.stage = self.stage_of(rank)
        self._group, self._links = group, links
        first = range(self.size - config.tensor_parallel_size, self.size)
        self._embedding = tuple(first) if rank == 0 else ()
        self._limit_s: float | None = None
        # Two threads send batches and tokens. A lock for all connections would let tokens wait for
        # a rank whose buffer of batches is full, and which computes on only with these tokens.
        self._sending = {linked_rank: threading.Lock() for linked_rank in links.steps}
        self._batches: deque[bytes] = deque()
        self._tokens: deque[bytes] = deque()
        self._is_lost = False
        self._is_closed = False
        self._unsent: queue.Queue[torch.Tensor | None] = queue.Queue(_MAX_UNSENT)
        self._sender: threading.Thread | None = None
        if links.after is not None:
            self._sender = threading.Thread(target=self._send_all, args=(links.after,), daemon=True)
            self._sender.start()

    @property
    @override
    def group(self) -> RankGroup | None:
        return self._group

    @override
    def limit_waits(self, timeout_s: float) -> None:
        self._limit_s = timeout_s
        if self._group is not None:
            self._group.limit_waits(timeout_s)

    @override
    def send(self, data: bytes) -> None:
        self._send_to(self._links.steps, _BATCH + data)

    @override
    def send_tokens(self, data: bytes) -> None:
        self._send_to(self._embedding, _TOKENS + data)

    @override
    def receive(self, *, waits_forever: bool = False) -> bytes:
        while not self._batches:
            self._read_step(waits_forever=waits_forever)
        batch = self._batches.popleft()
        if batch == END:
            raise GroupEndedError
        return batch

    @override
    def receive_tokens(self, *, waits: bool = True) -> bytes | None:
        while not self._tokens:
            if not waits and not self._is_readable():
                return None
            self._read_step()
        return self._tokens.popleft()

    @override
    def send_hidden(self, hidden: torch.Tensor) -> None:
        if self._is_lost:
            raise RanksLostError("another rank has ended")
        try:
            self._unsent.put(hidden.clone(), timeout=self._limit_s)
        except queue.Full:
            raise self._lost("the next stage does not answer in time") from None

    @override
    def receive_hidden(self, hidden: torch.Tensor) -> None:
        link = self._links.before
        assert link is not None, "the first stage reads tokens"
        try:
            self._wait_for(link, "the stage before")
            num_bytes = link.recv_bytes_into(_view_bytes(hidden))
        except (OSError, EOFError, BufferTooShort) as error:
            raise self._lost(f"the stage before is lost: {error}") from error
        if num_bytes != hidden.nbytes:
            raise self._lost(f"the stage before sent {num_bytes} bytes instead of {hidden.nbytes}")

    @override
    def abort(self) -> None:
        self._is_lost = True
        for link in self._links.all():
            with suppress(OSError):
                shut_down(link)
        if self._group is not None:
            self._group.abort()

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for link in self._links.all():
            with suppress(OSError):
                shut_down(link)
        if self._sender is not None:
            self._unsent.put(None)
            self._sender.join()
        for link in self._links.all():
            link.close()
        if self._group is not None:
            self._group.close()

    def _send_to(self, ranks: Iterable[int], data: bytes) -> None:
        try:
            for rank in ranks:
                with self._sending[rank]:
                    self._links.steps[rank].send_bytes(data)
        except OSError as error:
            raise self._lost(f"a rank has ended: {error}") from error

    def _read_step(self, *, waits_forever: bool = False) -> None:
        """Reads a message of rank 0."""
        link = self._links.steps[0]
        try:
            if not waits_forever:
                self._wait_for(link, "rank 0")
            message = link.recv_bytes()
        except (OSError, EOFError) as error:
            raise self._lost(f"rank 0 is lost: {error}") from error
        (self._batches if message[:1] == _BATCH else self._tokens).append(message[1:])

    def _is_readable(self) -> bool:
        try:
            return self._links.steps[0].poll()
        except (OSError, EOFError) as error:
            raise self._lost(f"rank 0 is lost: {error}") from error

    def _wait_for(self, link: Connection, sender: str) -> None:
        if not link.poll(self._limit_s):
            raise self._lost(f"{sender} has not answered in time")

    def _send_all(self, link: Connection) -> None:
        """Sends hidden states until the ranks close or another one ends."""
        while (hidden := self._unsent.get()) is not None:
            if self._is_lost:  # `send_hidden` and `close` may wait for room
                continue
            try:
                link.send_bytes(_view_bytes(hidden))
            except OSError:
                self.abort()

    def _lost(self, message: str) -> RanksLostError:
        self.abort()
        return RanksLostError(message)


def _view_bytes(hidden: torch.Tensor) -> memoryview:
    return hidden.view(torch.uint8).numpy().data.cast("B")
