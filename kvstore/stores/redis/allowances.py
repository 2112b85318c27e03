"""`Allowance`: whether the servers take commands that a call can do without."""

import logging
import time
from collections.abc import Callable

__all__ = ["Allowance"]

_RETRY_S = 10.0
_logger = logging.getLogger("baton.kvstore")


class Allowance:
    """Remembers that servers refuse a kind of command, which is tried again after ten seconds.

    Logs the refusal once, and its end. Any thread may use it.

    Args:
        consequence: what the store does without the commands, for the log.
        clock: returns seconds.

    Attributes:
        refusal: why the commands are refused; empty while they are allowed.
    """

    def __init__(self, consequence: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.refusal = ""
        self._consequence = consequence
        self._clock = clock
        self._again_at = 0.0

    def __bool__(self) -> bool:
        """Returns whether to try the commands."""
        return not self.refusal or self._clock() >= self._again_at

    @property
    def remark(self) -> str:
        """The refusal and its consequence; empty while the commands are allowed."""
        return f"{self._consequence}: {self.refusal}" if self.refusal else ""

    def refuse(self, reason: str) -> None:
        """Notes a refusal."""
        self._again_at = self._clock() + _RETRY_S
        was_allowed, self.refusal = not self.refusal, reason
        if was_allowed:
            _logger.warning("redis: %s", self.remark)

    def allow(self) -> None:
        """Notes that the commands were taken."""
        if self.refusal:
            _logger.info("redis: no longer: %s", self._consequence)
            self.refusal = ""
