"""The end of a listening socket."""

import asyncio
import socket
from contextlib import ExitStack

from router.http.acceptor import Acceptor
from rpc.listeners import open_listeners

NUM_CLIENTS = 150  # more than are accepted in one round of the event loop


async def test_connections_that_wait_are_taken_before_the_socket_closes():
    (listener,) = open_listeners("127.0.0.1", 0, NUM_CLIENTS)
    opened: list[asyncio.BaseTransport] = []
    all_opened = asyncio.Event()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport):
            opened.append(transport)
            if len(opened) == NUM_CLIENTS:
                all_opened.set()

    acceptor = Acceptor(
        listener,
        Protocol,
        lambda: len(opened),
        int,
        max_connections=2 * NUM_CLIENTS,
        handshake_timeout_s=10,
    )
    address = listener.getsockname()
    with ExitStack() as clients:
        for _ in range(NUM_CLIENTS):  # the event loop does not run meanwhile
            clients.enter_context(socket.create_connection(address, timeout=10))
        acceptor.close()
        async with asyncio.timeout(10):
            await all_opened.wait()
        acceptor.close()
        for transport in opened:
            transport.abort()
    await acceptor.wait_closed()
