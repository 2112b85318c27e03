"""`CompileClock`: how long this process has compiled kernels, as Triton's hooks report it.

A kernel of a new shape is compiled when it is first launched, which takes seconds: whoever watches
over steps must tell that from a step that hangs.
"""

import time
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

from triton import knobs

__all__ = ["CompileClock", "compile_clock"]

_MAX_S = 120.0
"""The longest that one compilation counts. One that takes longer hangs, or has failed: Triton calls
no hook then.
"""


class CompileClock:
    """Sums up the time in which at least one thread compiles.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._total_s = 0.0
        self._began: dict[object, float] = {}  # by the key of a kernel that is being compiled
        self._since = 0.0  # when the first of them began

    def read_s(self) -> float:
        """Returns the seconds until now, those of compilations under way included."""
        with self._lock:
            return self._total_s + (self._elapsed_s() if self._began else 0.0)

    def begin(self, key: object) -> None:
        """Notes that a kernel is being compiled."""
        with self._lock:
            if not self._began:
                self._since = self._clock()
            elif self._elapsed_s() >= _MAX_S:  # they have failed, or hang
                self._total_s += _MAX_S
                self._began.clear()
                self._since = self._clock()
            self._began[key] = self._clock()

    def end(self, key: object) -> None:
        """Notes that a kernel is compiled; does nothing for one that was not begun."""
        with self._lock:
            if self._began.pop(key, None) is not None and not self._began:
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
