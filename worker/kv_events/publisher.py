"""`KvEventPublisher`: publishes a worker's KV events as vLLM's publisher does.

A message has three frames: topic, number (8 bytes, big-endian) and payload, see
`worker.kv_events.messages`. Subscribers see a gap in the numbers if they lag so far that messages
were dropped. They then ask the other socket for the messages from a number on, and get them with
an empty frame in front; a message without payload ends the answer.

All of it runs on the event loop, a message at a time. An answer has a deadline.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine
from typing import Any

import msgspec

from baton.common.errors import UnavailableError
from engine.kv_cache.spec import spec_of
from engine.loop.async_engine import AsyncEngine
from worker.kv_events.history import MessageHistory
from worker.kv_events.messages import EventBatch, VllmEvents
from worker.kv_events.sockets import KvEventSockets

__all__ = ["KvEventPublisher"]

_LOGGER = logging.getLogger("baton.kv_events")
_MAX_ANSWERS = 8
"""Subscribers that are answered at a time; others get no answer, and ask again."""
_ANSWER_TIMEOUT_S = 10.0
"""Time for a subscriber to take one message of an answer."""
_RETRY_S = 0.01
_MIN_KEPT_KEYS = 4096
_END_NUMBER = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    """Publishes the events of an engine that has taken no request yet, until it is closed.

    Args:
        sockets: where; closed with the publisher.
        engine: the engine.
        topic: the first frame of each message.
        rank: number of the worker among those with its topic.
    """

    def __init__(
        self, sockets: KvEventSockets, engine: AsyncEngine, topic: str, rank: int = 0
    ) -> None:
        spec = spec_of(engine.config, engine.info)
        capacity = engine.num_blocks + engine.load().num_slots
        self._sockets = sockets
        self._questions = engine.questions
        self._topic, self._rank = topic.encode(errors="surrogateescape"), rank
        self._events = VllmEvents(spec)
        self._history = MessageHistory(
            2 * capacity + _MIN_KEPT_KEYS if sockets.answers_requests else None
        )
        self._encode = msgspec.msgpack.Encoder().encode
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: set[asyncio.Task[None]] = set()
        engine.questions.log_tokens()
        self._run(self._publish_all(), self._tasks)
        if sockets.answers_requests:
            self._run(self._answer_all(), self._tasks)

    async def close(self) -> None:
        """Ends, and drops what was not sent."""
        tasks = [*self._tasks, *self._answers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sockets.close()

    def _run(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(_logging_errors(work))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _publish_all(self) -> None:
        while True:
            for batch in self._events.batches(await self._questions.token_events()):
                await self._publish(batch)
                await asyncio.sleep(0)  # other tasks run between two messages
            if self._history.is_full:
                self._questions.repeat_tokens()

    async def _publish(self, batch: EventBatch) -> None:
        payload = self._encode(batch.payload(time.time(), self._rank))
        message = self._history.add(payload, batch.num_keys, starts_over=batch.starts_over)
        await self._sockets.publish((self._topic, message.number_frame, payload))

    async def _answer_all(self) -> None:
        while True:
            match await self._sockets.next_request():
                case [client, b"", number] if len(number) == len(_END_NUMBER):
                    if len(self._answers) < _MAX_ANSWERS:
                        answer = self._answer(client, int.from_bytes(number, "big"))
                        self._run(answer, self._answers)
                case frames:
                    _LOGGER.debug("ignored a request of %d frames", len(frames))
            await asyncio.sleep(0)

    async def _answer(self, client: bytes, number: int) -> None:
        """Sends the messages of now from a number on. If they start over meanwhile, the client
        sees a gap in the numbers.
        """
        end = self._history.next_number
        while (message := self._history.first_from(number)) is not None and message.number < end:
            await self._send(client, self._topic, message.number_frame, message.payload)
            number = message.number + 1
        await self._send(client, b"", _END_NUMBER, b"")

    async def _send(self, client: bytes, *frames: bytes) -> None:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            while not await self._sockets.answer((client, b"", *frames)):  # noqa: ASYNC110
                await asyncio.sleep(_RETRY_S)
            await asyncio.sleep(0)


async def _logging_errors(work: Awaitable[None]) -> None:
    """Logs an error, as it must not end the worker. That the engine has stopped, and that a
    subscriber has left or does not read, are none.
    """
    try:
        await work
    except (UnavailableError, ConnectionError, TimeoutError) as error:
        _LOGGER.debug("ended: %s", error)
    except Exception:
        _LOGGER.exception("KV events are published no longer")
