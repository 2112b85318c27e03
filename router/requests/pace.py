"""`Pace`: how long streams pause between messages while the event loop is late."""

import asyncio

__all__ = ["Pace"]

_INTERVAL_S = 0.01
_UNUSED_INTERVAL_S = 0.1
_MAX_UNUSED = 100
"""Measurements without a message in between, before they become rarer."""
_MIN_PAUSE_S = 0.005
"""Timers of a loop that is not busy are late by less."""
_MAX_LATE_S = 0.1
_PAUSE_PER_LATENESS = 4
"""A loop that is late by the time of one round through all streams then spends about a fifth of
its time on running streams' messages.
"""


class Pace:
    """Measures how late the event loop runs its timers.

    A message costs more than the tokens in it. When the loop cannot send all tokens in messages
    of their own, streams that pause after each message get several tokens into the next one, and
    the loop has time for new requests again.

    Attributes:
        pause_s: how long a stream pauses after a message; 0 if the loop is not late.
        is_used: to be set with each message. An idle process measures less often.
    """

    def __init__(self) -> None:
        self.pause_s = 0.0
        self.is_used = False

    async def run(self) -> None:
        """Measures without end."""
        loop, num_unused = asyncio.get_running_loop(), 0
        while True:
            num_unused = 0 if self.is_used else num_unused + 1
            self.is_used = False
            interval_s = _INTERVAL_S if num_unused <= _MAX_UNUSED else _UNUSED_INTERVAL_S
            due = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            late_s = min(loop.time() - due, _MAX_LATE_S)
            self.pause_s = _PAUSE_PER_LATENESS * late_s if late_s > _MIN_PAUSE_S else 0.0
