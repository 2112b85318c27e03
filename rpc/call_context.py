"""`CallContext`: a servicer's context, whose writes end when the client does not read."""

import asyncio
from typing import Any

import grpc

from baton.common.errors import DeadlineExceededError
from baton.common.reasons import Reason

__all__ = ["CallContext", "Context"]

_MAX_JOINED_BYTES = 1024
"""Of a first message that is sent together with the metadata before it, which is faster."""

Context = grpc.aio.ServicerContext[Any, Any]


class CallContext:
    """The context of a call, with a time limit on writes that the client does not read.

    A write waits while the client reads none of the messages before it. All methods but `write`
    are those of grpc.aio's context.

    Args:
        context: of grpc.aio.
        send_timeout_s: the longest wait of a write; None for no limit.

    Attributes:
        is_unread: whether a write has waited for too long.
        is_over: whether a write has failed, as the client has left.
    """

    def __init__(self, context: Context, send_timeout_s: float | None) -> None:
        self._context = context
        self._timeout_s = send_timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[Any] | None = None
        self._writes_since = 0.0
        self.is_unread = self.is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Sends a message.

        Raises:
            DeadlineExceededError: the client has read nothing for `send_timeout_s`.
            CancelledError: the client has left.
        """
        self._writing, self._writes_since = asyncio.current_task(), self._loop.time()
        try:
            if self._timer is None and self._timeout_s is not None:
                await self._begin(message, self._timeout_s)
            await self._context.write(message)
        except grpc.aio.InternalError:
            # The call is over. grpc.aio cancels its task then, but perhaps not before this error.
            self.is_over = True
            raise asyncio.CancelledError from None
        except asyncio.CancelledError:
            if self.is_unread and self._writing is not None:
                self._writing.uncancel()
                raise DeadlineExceededError(
                    f"the client has read nothing for {self._timeout_s:g} s (--send-timeout-s)",
                    reason=Reason.ANSWER_NOT_READ,
                ) from None
            raise
        finally:
            self._writing = None

    async def _begin(self, message: Any, timeout_s: float) -> None:
        """Called before the first message."""
        self._timer = self._loop.call_later(timeout_s, self._check, timeout_s)
        if message.ByteSize() > _MAX_JOINED_BYTES:
            # If the client did not read the message, its call could have no status: grpc.aio would
            # send the metadata before the message once more.
            await self._context.send_initial_metadata(())

    def close(self) -> None:
        """Called when the call has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self, timeout_s: float) -> None:
        """Ends a write that waits for too long. One timer serves all messages of a call."""
        now = self._loop.time()
        waiting_since = now if self._writing is None else self._writes_since
        left_s = waiting_since + timeout_s - now
        if left_s > 0 or self._writing is None:
            self._timer = self._loop.call_later(left_s, self._check, timeout_s)
        else:
            self.is_unread = True
            self._writing.cancel()
