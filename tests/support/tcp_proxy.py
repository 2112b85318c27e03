"""A network path of a test's own: it loses what it carries, breaks, and comes back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

__all__ = ["TcpProxy", "running_proxy"]

_CHUNK_BYTES = 1 << 16
# Buffers would swallow what the test thinks it holds back.
_BUFFER_BYTES = 1 << 12


class TcpProxy:
    """Carries connections to a server, both ways. Of the event loop that started it.

    What is held back is late, not lost: it comes once it may pass, as TCP would send it again.

    Args:
        target: `host` and `port` of the server.
        host: to listen on.
        port: to listen on; 0 for a free one, which it keeps.

    Attributes:
        port: where it listens.
        is_holding: set while something waits to pass.
    """

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1", port: int = 0) -> None:
        self._target, self._host, self.port = target, host, port
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._num_left: dict[str, int] = {}  # bytes that may pass before it holds, by what
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_holding = asyncio.Event()

    async def start(self) -> None:
        """Listens; also after `cut`, at the same address."""
        self._server = await asyncio.start_server(self._accept, self._host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def hold(self) -> None:
        """From now on nothing passes either way; connections are taken and answer nothing."""
        self._open.clear()

    def hold_after(self, num_bytes: int, what: str) -> None:
        """Holds after so many more bytes, in the midst of whatever they are.

        Args:
            num_bytes: that still pass, over all connections.
            what: "requests" or "answers": which way they go.
        """
        self._num_left[what] = num_bytes

    def let_pass(self) -> None:
        """What was held comes, and all else after it."""
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
        """Cuts, and waits until all is gone."""
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
        """Carries bytes one way until either end is gone."""
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
        raise EOFError  # ends the other way too

    async def _pass(self) -> None:
        if not self._open.is_set():
            self.is_holding.set()
            await self._open.wait()


@asynccontextmanager
async def running_proxy(
    target: tuple[str, int], host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[TcpProxy]:
    """A proxy that listens; closed at the end. See `TcpProxy` for the arguments."""
    proxy = TcpProxy(target, host, port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
