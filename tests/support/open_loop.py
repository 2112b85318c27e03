"""Load on the HTTP API of a router, with little work per request for the client."""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

__all__ = ["Answer", "closed_loop", "open_loop"]

_WORDS = ("the", "of", "and", "to", "in", "that", "is", "was", "for", "it", "with", "as", "on")


@dataclass(frozen=True)
class Answer:
    """The end of one request.

    Attributes:
        status: of HTTP.
        elapsed_s: from its start to its end.
        has_retry_after: whether the answer says when to try again.
    """

    status: int
    elapsed_s: float
    has_retry_after: bool


class _Client:
    """Sends completions of 60 words and 16 tokens, on connections that are kept."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._timeout_s = parts.hostname, parts.port, timeout_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._draw = random.Random()  # no prompt is in a cache

    async def send(self) -> Answer:
        started = time.monotonic()
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self._request())
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        self._idle.append((reader, writer))
        elapsed_s = time.monotonic() - started
        return Answer(int(head.split()[1]), elapsed_s, b"\r\nretry-after:" in head)

    def _request(self) -> bytes:
        prompt = " ".join(self._draw.choices(_WORDS, k=60))
        body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
        data = json.dumps(body).encode()
        return (
            f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            f"X-Request-Timeout-S: {self._timeout_s}\r\nContent-Length: {len(data)}\r\n\r\n"
        ).encode() + data

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def closed_loop(url: str, *, width: int, seconds: float, timeout_s: float) -> list[Answer]:
    """Keeps `width` requests running for some seconds."""
    client, end = _Client(url, timeout_s), time.monotonic() + seconds
    answers: list[Answer] = []

    async def repeat() -> None:
        while time.monotonic() < end:
            answers.append(await client.send())

    await asyncio.gather(*(repeat() for _ in range(width)))
    client.close()
    return answers


async def open_loop(
    url: str, *, rate: float, seconds: float, timeout_s: float
) -> tuple[list[Answer], float]:
    """Sends requests at a steady rate, whatever the answers are. Returns the answers, and by how
    much this process was late at worst, which the answers may seem to be.
    """
    client, started, late_s = _Client(url, timeout_s), time.monotonic(), 0.0
    tasks = []
    for number in range(int(rate * seconds)):
        wait_s = started + number / rate - time.monotonic()
        late_s = max(late_s, -wait_s)
        await asyncio.sleep(max(wait_s, 0))
        tasks.append(asyncio.create_task(client.send()))
    answers = await asyncio.gather(*tasks)
    client.close()
    return answers, late_s
