"""`DecodeServicer`: DecodeService over an engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from typing_extensions import override

from baton.v1 import decode_pb2, decode_pb2_grpc
from decode_service.router_session import RouterSession
from engine.loop.async_engine import AsyncEngine
from rpc.worker_spans import WorkerSpans

__all__ = ["DecodeServicer"]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Generates tokens; `protos/baton/v1/decode.proto` documents the methods.

    Args:
        engine: a started engine.
        spans: sends spans; None sends none.
    """

    def __init__(self, engine: AsyncEngine, spans: WorkerSpans | None = None) -> None:
        self._engine = engine
        self._spans = spans
        self._sessions: set[RouterSession] = set()
        self._all_ended = asyncio.Event()

    @override
    async def Connect(
        self, request_iterator: AsyncIterator[decode_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[decode_pb2.ConnectResponse]:
        session = RouterSession(self._engine, self._spans)
        self._sessions.add(session)
        try:
            async with aclosing(session.responses(request_iterator)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._all_ended.set()

    async def close(self, timeout_s: float) -> None:
        """Ends each stream once the last outputs of its requests are sent, or at the timeout."""
        self._all_ended.clear()
        for session in self._sessions:
            session.close()
        if not self._sessions:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_ended.wait()
        except TimeoutError:
            pass
