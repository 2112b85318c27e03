"""The exchanges of pipeline stages: a lost or slow rank neither hangs nor shifts the others."""

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
import torch

from engine.config import EngineConfig
from engine.runtime.ranks import rank_transfers
from engine.runtime.ranks.pipeline import PipelineLinks, PipelineRanks
from engine.runtime.ranks.rank_transfers import RankTransfers
from kernels.ranks import RanksLostError

CONFIG = EngineConfig(model="m", pipeline_parallel_size=3)
LARGE = bytes(8_000_000)  # more than a socket's buffer


@contextmanager
def last_stage() -> Iterator[tuple[PipelineRanks, dict[int, Connection], Connection]]:
    """Yields rank 0, the others' ends of its links for steps, and that of the stage before."""
    with ExitStack() as stack:
        own, theirs = {}, {}
        for rank in (1, 2):
            own[rank], theirs[rank] = Pipe()
            stack.enter_context(theirs[rank])
        before, sender = Pipe()
        stack.enter_context(sender)
        ranks = PipelineRanks(0, CONFIG, None, PipelineLinks(own, before), 1)
        stack.callback(ranks.close)
        yield ranks, theirs, sender


@contextmanager
def first_stage() -> Iterator[tuple[PipelineRanks, Connection]]:
    """Yields the last rank, and the next stage's end of its connection."""
    steps, rank_0 = Pipe()
    after, next_stage = Pipe()
    ranks = PipelineRanks(2, CONFIG, None, PipelineLinks({0: steps}, after=after), 1)
    with rank_0, next_stage:
        yield ranks, next_stage
        ranks.close()


def test_tokens_pass_a_batch_that_another_stage_does_not_read() -> None:
    with last_stage() as (ranks, theirs, _):
        sending = threading.Thread(target=ranks.send, args=(LARGE,))
        sending.start()
        assert theirs[1].poll(10)  # the batch has filled the buffer of rank 1
        ranks.send_tokens(b"tokens")
        assert theirs[2].recv_bytes().endswith(b"tokens")
        theirs[1].recv_bytes()
        theirs[2].recv_bytes()
        sending.join(10)
        assert not sending.is_alive()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_hidden_states_of_another_step_are_refused(num_rows: int) -> None:
    with last_stage() as (ranks, _, sender):
        sender.send_bytes(bytes(num_rows * 4 * 4))
        with pytest.raises(RanksLostError, match="the stage before"):
            ranks.receive_hidden(torch.empty(2, 4))


def test_a_stage_whose_successor_is_lost_fails_and_closes() -> None:
    with first_stage() as (ranks, next_stage):
        next_stage.close()
        with suppress(RanksLostError):  # which of these fails is a race
            for _ in range(10):
                ranks.send_hidden(torch.zeros(2, 4))
        with pytest.raises(RanksLostError):
            ranks.send_hidden(torch.zeros(2, 4))
        closing = threading.Thread(target=ranks.close)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()


def test_the_wait_for_the_rest_of_a_message_ends_after_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_transfers, "_END_S", 0.01)
    steps, rank_0 = Pipe()
    own, theirs = Pipe()
    ranks = PipelineRanks(1, CONFIG, None, PipelineLinks({0: steps}), 1)
    failures = []

    def receive() -> None:
        try:
            ranks.receive(waits_forever=True)
        except RanksLostError as error:
            failures.append(error)

    receiving = threading.Thread(target=receive, daemon=True)
    with rank_0:
        os.write(rank_0.fileno(), struct.pack("!i", 100) + b"half")
        receiving.start()
        RankTransfers(theirs, ranks)
        own.close()  # rank 0 has ended, but the network has not reset its connection for steps
        receiving.join(10)
        assert len(failures) == 1
    ranks.close()
