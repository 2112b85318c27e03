"""`run_in_virtual_time`: runs a coroutine whose waits take no time.

The event loop's clock stands still while anything can run, and jumps to the next timer when nothing
can. So an hour of sleeps takes as long as its callbacks, and gives the same result each time.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from typing_extensions import override

from baton.common.errors import InternalError

__all__ = ["VirtualTimeLoop", "run_in_virtual_time"]

_Result = TypeVar("_Result")


class _NoWaits(selectors.BaseSelector):
    """A selector that moves a clock where another one would wait.

    Attributes:
        now: the clock, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._inner = selectors.DefaultSelector()

    @override
    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    @override
    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Moves the clock by the timeout. Files are looked at only if there is no timer: a call of
        the system for each would take as long as what is simulated.

        Raises:
            InternalError: there is no timer, so that the wait would have no end.
        """
        if timeout is not None:
            self.now += max(timeout, 0.0)
            return []
        if ready := self._inner.select(0):
            return ready
        raise InternalError("all tasks wait, and no timer would wake one")

    @override
    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    @override
    def close(self) -> None:
        self._inner.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps from timer to timer, beginning at 0."""

    def __init__(self) -> None:
        self._no_waits = _NoWaits()
        super().__init__(self._no_waits)
        self._clock_resolution = 1e-9
        self._has_failed = False

    @override
    def time(self) -> float:
        return self._no_waits.now

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raises the first error of a callback out of the loop, which would only log it
        otherwise.
        """
        error = context.get("exception")
        if error is not None and not self._has_failed:
            self._has_failed = True
            raise error
        super().call_exception_handler(context)


def run_in_virtual_time(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Returns the result of a coroutine, which must not wait for anything outside of the process.

    Raises:
        InternalError: all tasks wait for something that never comes.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
