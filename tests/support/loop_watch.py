"""How long the callbacks of event loops in this process take."""

import asyncio.events
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MAX_CALLBACK_S = 0.1
"""The longest time for which one callback may keep an event loop from all others. Those of long
bodies take some 12 ms, and four times that while both cores are busy."""


@dataclass
class LoopWatch:
    """The callbacks of event loops that took longer than a limit."""

    max_callback_s: float = MAX_CALLBACK_S
    longest_s: float = 0.0
    too_long: list[tuple[float, str]] = field(default_factory=list)

    def assert_never_blocked(self) -> None:
        """Fails if a callback took longer than the limit, and names the longest ones."""
        worst = sorted(self.too_long, reverse=True)[:5]
        assert not worst, f"callbacks blocked the event loop: {worst}"


@contextmanager
def watched_loops(max_callback_s: float = MAX_CALLBACK_S) -> Iterator[LoopWatch]:
    """Measures each callback, in seconds of processor time of the loop's thread.

    Other processes and threads of a busy machine do not add to the time. A callback that waits
    without computing is not noticed. The collector of cycles is off: its pauses grow with all
    objects of the process, those of other tests included, and it starts in any callback.
    """
    watch = LoopWatch(max_callback_s)
    handle_class: Any = asyncio.events.Handle
    run = handle_class._run

    def measured_run(handle: Any) -> None:
        started = time.thread_time()
        run(handle)
        elapsed_s = time.thread_time() - started
        watch.longest_s = max(watch.longest_s, elapsed_s)
        if elapsed_s > max_callback_s:
            watch.too_long.append((elapsed_s, repr(handle)))

    handle_class._run = measured_run
    gc.disable()
    try:
        yield watch
    finally:
        gc.enable()
        handle_class._run = run
