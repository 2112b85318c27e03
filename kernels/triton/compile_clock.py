"""`CompileClock`: how long this process has compiled kernels, as Triton's hooks report it.

A kernel of a new shape is compiled when it is first launched, which takes seconds: whoever watches
over steps must tell that from a step that hangs.
"""

import time
from collections.abc import Callable, Iterable
from functools import cache
from threading import Lock, get_ident
from typing import Any

from triton import knobs

__all__ = ["CompileClock", "compile_clock"]

_MAX_S = 120.0
"""The longest that one compilation counts. One that takes longer hangs, or has failed in a thread
that has not read the clock since.
"""


class CompileClock:
    """Sums up the time in which at least one thread compiles.

    Triton calls no hook when a compilation fails. A thread that begins another one or reads the
    clock does not compile any more, so what it had begun counts no further.

    Args:
        clock: monotonic seconds.
        thread: returns the number of the calling thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        thread: Callable[[], int] = get_ident,
    ) -> None:
        self._clock = clock
        self._thread = thread
        self._lock = Lock()
        self._total_s = 0.0
        self._threads: dict[object, int] = {}  # by the key of a kernel that is being compiled
        self._since = 0.0  # when the first of them began

    def read_s(self) -> float:
        """Returns the seconds until now, those of compilations under way included."""
        with self._lock:
            self._end_failed()
            return self._total_s + (self._elapsed_s() if self._threads else 0.0)

    def begin(self, key: object) -> None:
        """Notes that a kernel is being compiled."""
        with self._lock:
            self._end_failed()
            if not self._threads:
                self._since = self._clock()
            elif self._elapsed_s() >= _MAX_S:  # they have failed, or hang
                self._total_s += _MAX_S
                self._threads.clear()
                self._since = self._clock()
            self._threads[key] = self._thread()

    def end(self, key: object) -> None:
        """Notes that a kernel is compiled; does nothing for one that was not begun."""
        with self._lock:
            self._end([key])

    def _end_failed(self) -> None:
        """Ends what this thread compiled, as it has failed."""
        thread = self._thread()
        self._end([key for key, number in self._threads.items() if number == thread])

    def _end(self, keys: Iterable[object]) -> None:
        known = [key for key in keys if self._threads.pop(key, None) is not None]
        if known and not self._threads:
            self._total_s += self._elapsed_s()

    def _elapsed_s(self) -> float:
        return min(self._clock() - self._since, _MAX_S)


@cache
def compile_clock() -> CompileClock:
    """Returns the clock of this process, which it sets to work on the first call."""
    clock, runtime = CompileClock(), knobs.runtime
    before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def begin(*, key: str, **facts: Any) -> bool | None:
        clock.begin(key)
        return before(key=key, **facts) if before is not None else None

    def end(*, key: str, **facts: Any) -> bool | None:
        clock.end(key)
        return after(key=key, **facts) if after is not None else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = begin, end
    return clock
