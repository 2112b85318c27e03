"""Runs every case on every engine, in turn, so that a machine that drifts treats them alike."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from benchmarks.peers.cases import Case, requests_of_round
from benchmarks.peers.peer_messages import PeerRun
from benchmarks.request import BenchRequest

__all__ = ["Peer", "Runs", "running", "take_turns"]

Runs = dict[str, dict[str, list[PeerRun]]]
"""By engine, then by case, in the order of the rounds."""


class Peer(Protocol):
    """What is needed of a `PeerProcess`."""

    def run(self, requests: Sequence[BenchRequest]) -> PeerRun:
        """Answers the requests."""

    def reset(self) -> None:
        """Empties its caches of prefixes."""

    def pause(self) -> None:
        """Stops it from using the CPU."""

    def resume(self) -> None:
        """Lets it run again."""


@contextmanager
def running(peer: Peer) -> Iterator[Peer]:
    """Lets a paused engine run; it is paused again afterwards."""
    peer.resume()
    try:
        yield peer
    finally:
        peer.pause()


def take_turns(
    peers: Mapping[str, Peer],
    cases: Sequence[Case],
    vocab_size: int,
    repeats: int,
    tell: Callable[[str], None],
    before_round: Callable[[], None],
) -> Runs:
    """Runs all cases `repeats` times, and once before that does not count.

    Args:
        peers: by name, paused; one runs at a time.
        cases: what to run.
        vocab_size: of the model.
        repeats: rounds that count.
        tell: takes a line about each run.
        before_round: called before each round that counts, while all are paused.
    """
    runs: Runs = {name: {case.name: [] for case in cases} for name in peers}
    for number in range(1 + repeats):
        if number:
            before_round()
        for case in cases:
            requests = requests_of_round(case, number, vocab_size)
            for name in _rotated(list(peers), number):
                with running(peers[name]) as peer:
                    peer.reset()
                    run = peer.run(requests)
                tell(f"round {number} of {repeats}: {case.name} on {name}: {run.wall_s:.2f} s")
                if number:
                    runs[name][case.name].append(run)
    return runs


def _rotated(names: Sequence[str], by: int) -> list[str]:
    """So that nobody always comes after the same one."""
    by %= len(names)
    return [*names[by:], *names[:by]]
