"""A TCP proxy that can hold back bytes, reset connections and listen again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.support.ports import reserved_port

__all__ = ["TcpProxy", "running_proxy"]

_CHUNK_BYTES = 1 << 16
# Large buffers would hide bytes that the test means to hold back.
_BUFFER_BYTES = 1 << 12


class TcpProxy:
    """Forwards connections to a server in both directions, in the event loop that started it.

    Bytes that are held back are late, not lost: they arrive after `let_pass`, as with TCP's
    retransmissions.

    Args:
        target: `host` and `port` of the server.
        host: address to listen on.
        port: port to listen on; by default one of its own.

    Attributes:
        port: port that it listens on.
        is_holding: set while bytes or connections are held back.
    """

    def __init__(
        self, target: tuple[str, int], host: str = "127.0.0.1", port: int | None = None
    ) -> None:
        self._target, self._host = target, host
        self.port = reserved_port() if port is None else port
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._num_left: dict[str, int] = {}  # bytes that may still pass, by direction
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_holding = asyncio.Event()

    async def start(self) -> None:
        """Listens; after `cut`, at the same address again."""
        self._server = await asyncio.start_server(self._accept, self._host, self.port)

    def hold(self) -> None:
        """Holds back all bytes from now on; accepts connections but answers nothing."""
        self._open.clear()

    def hold_after(self, num_bytes: int, what: str) -> None:
        """Holds back all bytes after `num_bytes` more, even in the middle of a message.

        Args:
            num_bytes: bytes that still pass, over all connections.
            what: direction that is counted, "requests" or "answers".
        """
        self._num_left[what] = num_bytes

    def let_pass(self) -> None:
        """Forwards held bytes and all later ones."""
        self._num_left.clear()
        self.is_holding.clear()
        self._open.set()

    def cut(self) -> None:
        """Resets all connections and refuses new ones."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        self.let_pass()

    async def close(self) -> None:
        """Cuts, and waits until all tasks have ended."""
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        with suppress(OSError, asyncio.CancelledError):
            await self._pass()
            answers, requests = await asyncio.open_connection(*self._target)
            self._writers.add(requests)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._carry(reader, requests, "requests"))
                    group.create_task(self._carry(answers, writer, "answers"))
            except* (OSError, EOFError):
                pass
            finally:
                requests.transport.abort()
                self._writers.discard(requests)
        writer.transport.abort()
        self._writers.discard(writer)
        self._tasks.discard(task)

    async def _carry(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, what: str
    ) -> None:
        """Forwards bytes in one direction until either end closes."""
        target.transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        while data := await source.read(_CHUNK_BYTES):
            if what in self._num_left:
                first, data = data[: self._num_left[what]], data[self._num_left[what] :]
                self._num_left[what] -= len(first)
                target.write(first)
                if data:
                    self.hold()
            await self._pass()
            target.write(data)
            await target.drain()
        raise EOFError  # ends the other direction too

    async def _pass(self) -> None:
        if not self._open.is_set():
            self.is_holding.set()
            await self._open.wait()


@asynccontextmanager
async def running_proxy(
    target: tuple[str, int], host: str = "127.0.0.1", port: int | None = None
) -> AsyncIterator[TcpProxy]:
    """Runs a listening proxy until the block ends. See `TcpProxy` for the arguments."""
    proxy = TcpProxy(target, host, port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
