"""Runs every case on every engine in turn, so that changes of the machine's speed affect all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from benchmarks.peers.cases import PeerCase, requests_of_round
from benchmarks.peers.peer_messages import PeerRun
from benchmarks.request import BenchRequest

__all__ = ["RoundPeer", "Runs", "running", "take_turns"]

_WARM_UP_SHARE = 4
"""The round that does not count has one in so many of each case's requests."""

Runs = dict[str, dict[str, list[PeerRun]]]
"""The runs by engine, then by case, in the order of the rounds."""


class RoundPeer(Protocol):
    """The part of `PeerProcess` that rounds use."""

    def run(self, requests: Sequence[BenchRequest]) -> PeerRun:
        """Runs the requests."""

    def reset(self) -> None:
        """Empties the engine's prefix caches."""

    def pause(self) -> None:
        """Stops the engine, so that it uses no CPU."""

    def resume(self) -> None:
        """Continues the engine."""


@contextmanager
def running(peer: RoundPeer) -> Iterator[RoundPeer]:
    """Continues a paused engine, and pauses it again at the end."""
    peer.resume()
    try:
        yield peer
    finally:
        peer.pause()


def take_turns(
    peers: Mapping[str, RoundPeer],
    cases: Sequence[PeerCase],
    vocab_size: int,
    repeats: int,
    write_line: Callable[[str], None],
    before_round: Callable[[], None],
) -> Runs:
    """Runs all cases `repeats` times, after a round with fewer requests that does not count.

    Args:
        peers: paused engines by name. One runs at a time.
        cases: the cases.
        vocab_size: the model's vocabulary.
        repeats: rounds that count.
        write_line: called with a line about each run.
        before_round: called before each round that counts, while all engines are paused.
    """
    runs: Runs = {name: {case.name: [] for case in cases} for name in peers}
    for number in range(1 + repeats):
        if number:
            before_round()
        for case in cases:
            requests = requests_of_round(case, number, vocab_size)
            if not number:
                requests = requests[: -(-len(requests) // _WARM_UP_SHARE)]
            for name in _rotated(list(peers), number):
                with running(peers[name]) as peer:
                    peer.reset()
                    run = peer.run(requests)
                write_line(
                    f"round {number} of {repeats}: {case.name} on {name}: {run.wall_s:.2f} s"
                )
                if number:
                    runs[name][case.name].append(run)
    return runs


def _rotated(names: Sequence[str], by: int) -> list[str]:
    """Returns the names in another order each round, so that no engine always follows another."""
    by %= len(names)
    return [*names[by:], *names[:by]]
