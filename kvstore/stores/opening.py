"""`OpenedOnDemand`: what a store opens, such as files, mappings or connections."""

from collections.abc import Callable
from threading import Lock, Thread
from typing import Generic, Protocol, TypeVar

from baton.common.errors import ConfigurationError
from kvstore.store import StoreUnavailableError

__all__ = ["OpenedOnDemand"]

_MAX_START_WAIT_S = 5.0
_CLOSED = "the store is closed"


class _Closable(Protocol):
    def close(self) -> None:
        """Releases what was opened."""


_Opened = TypeVar("_Opened", bound=_Closable)


class OpenedOnDemand(Generic[_Opened]):
    """Opens something when it is needed, and anew after it was dropped. Thread-safe.

    A store that cannot be opened now is a store that is down: its calls fail, and each of them
    tries to open it.

    Args:
        open_anew: opens it. It may raise `OSError` and `StoreUnavailableError`; then it is tried
            again.
        timeout_s: longest wait for another thread that is opening it.
    """

    def __init__(self, open_anew: Callable[[], _Opened], timeout_s: float) -> None:
        self._open_anew = open_anew
        self._timeout_s = timeout_s
        self._lock = Lock()  # held while it is opened, and while `_opened` changes
        self._opened: _Opened | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Opens it if that is possible now.

        It is opened in a thread, since a file system that hangs must not keep a process from
        starting: after a few seconds, the thread goes on alone.

        Raises:
            ConfigurationError: `open_anew` has raised it.
        """
        errors: list[ConfigurationError] = []

        def open_now() -> None:
            try:
                self.get()
            except ConfigurationError as error:
                errors.append(error)
            except (OSError, StoreUnavailableError):
                pass  # the next call tries again, and reports it

        thread = Thread(target=open_now, name="baton-kv-open", daemon=True)
        thread.start()
        thread.join(_MAX_START_WAIT_S)
        if errors:
            raise errors[0]

    @property
    def current(self) -> _Opened | None:
        """The open object; None if none is open."""
        return self._opened

    def get(self) -> _Opened:
        """Returns the open object, and opens it first if needed.

        Raises:
            StoreUnavailableError: the store is closed, or another thread takes long to open it.
            Exception: `open_anew` has raised it.
        """
        opened = self._opened
        if opened is not None:
            return opened
        if not self._lock.acquire(timeout=self._timeout_s):
            raise StoreUnavailableError(f"it takes more than {self._timeout_s:g} s to open it")
        try:
            if self._is_closed:
                raise StoreUnavailableError(_CLOSED)
            if self._opened is None:
                self._opened = self._open_anew()
            opened = self._opened
        finally:
            self._lock.release()
        if self._is_closed:  # meanwhile
            self.close()
            raise StoreUnavailableError(_CLOSED)
        return opened

    def drop(self, lost: _Opened) -> None:
        """Closes something that is of no use any more, so that the next call opens it anew. If
        another thread has dropped it, does not wait for that thread, which may be opening it.
        """
        if self._opened is not lost or not self._lock.acquire(timeout=self._timeout_s):
            return
        is_first = self._opened is lost
        if is_first:
            self._opened = None
        self._lock.release()
        if is_first:
            lost.close()

    def close(self) -> None:
        """Closes what is open; waits a bounded time for a thread that opens it. Idempotent."""
        self._is_closed = True
        if not self._lock.acquire(timeout=self._timeout_s):
            return  # that thread closes what it opens
        opened, self._opened = self._opened, None
        self._lock.release()
        if opened is not None:
            opened.close()
