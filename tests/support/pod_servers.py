"""HTTP servers in the place of routers beside decode workers, which say whether they are ready."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["pod_server"]


@asynccontextmanager
async def pod_server(
    host: str, port: int, status: int | None = 200, context: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Runs a server.

    Args:
        host: its address.
        port: its port.
        status: of its answers; None if it takes requests and does not answer.
        context: for TLS; None for plain text.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            assert request.startswith(b"GET /ready HTTP/1.1\r\n")
            if status is not None:
                writer.write(b"HTTP/1.1 %d\r\nContent-Length: 0\r\n\r\n" % status)
            await reader.read()
        except (OSError, EOFError):
            pass  # the caller has left
        finally:
            writer.close()

    async with await asyncio.start_server(answer, host, port, ssl=context):
        yield
