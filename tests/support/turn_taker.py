"""`python -m tests.support.turn_taker FOLDER`: takes turns as an engine, on commands from stdin.

take            waits for a turn and prints "taken"
give            ends the turn and prints "given"
steps N FILE    takes N turns, writes its pid to FILE in each, and prints "done". A turn lasts
                until another process is next, or has had all of its turns.
fork            starts a child that runs until stdin ends; prints its pid
"""

import fcntl
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from engine.runtime.turns import Turns

__all__ = ["is_held", "wait_until"]

_DEADLINE_S = 60


def is_held(path: Path) -> bool:
    """Whether any process has locked the file."""
    with path.open("rb") as file:  # closing the file releases the lock if this got it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "the condition did not become true"
        os.sched_yield()


def _main(folder: Path) -> None:
    turns, turn = Turns(str(folder), longest_turn_s=_DEADLINE_S), ExitStack()
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "take":
            turn.enter_context(turns.wait_for_turn())
            _say("taken")
        elif command == "give":
            turn.close()
            _say("given")
        elif command == "steps":
            _take_steps(turns, folder, int(arguments[0]), Path(arguments[1]))
            _say("done")
        elif command == "fork":
            child = os.fork()
            if not child:
                sys.stdin.read()
                os._exit(0)
            _say(str(child))


def _take_steps(turns: Turns, folder: Path, count: int, order: Path) -> None:
    for _ in range(count):
        with turns.wait_for_turn():
            with order.open("a") as file:
                file.write(f"{os.getpid()}\n")
            wait_until(lambda: is_held(folder / "next") or _others_are_done(order, count))


def _others_are_done(order: Path, count: int) -> bool:
    pids = [int(line) for line in order.read_text().split()]
    return len(pids) - pids.count(os.getpid()) == count


def _say(word: str) -> None:
    print(word, flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
