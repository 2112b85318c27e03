"""Requests as `vllm bench serve` sends them, and its way to read the answers' streams."""

import json
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

_DATA = "data: "
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class BenchResult:
    """What the tool counts.

    Attributes:
        text: the first choice's text.
        num_pieces: events that count as tokens' arrivals.
        usage: of the last event; empty if none came.
    """

    text: str = ""
    num_pieces: int = 0
    usage: dict[str, Any] = field(default_factory=dict)


def completion_body(model: str, prompt: Any, max_tokens: int, **extra: Any) -> dict[str, Any]:
    """A body of `--backend openai`; `extra` are `--ignore-eos` and `--extra-body`."""
    return {
        "model": model,
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": max_tokens,
        "logprobs": None,
        **STREAM,
        **extra,
    }


def chat_body(model: str, text: str, max_tokens: int, **extra: Any) -> dict[str, Any]:
    """A body of `--backend openai-chat`."""
    content = [{"type": "text", "text": text}]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": max_tokens,
        **STREAM,
        **extra,
    }


def _is_whole(event: str) -> bool:
    if not event.startswith(_DATA):
        return False
    try:
        json.loads(event.removeprefix(_DATA))
    except ValueError:
        return event == f"{_DATA}[DONE]"
    return True


async def events_of(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Splits a stream as the tool does: it strips every piece that the connection gives, so
    that an event's end may be missing; what looks like a whole event then counts as one.
    """
    rest = ""
    async for piece in pieces:
        *events, rest = (rest + piece.strip().decode()).split("\n\n")
        if _is_whole(rest):
            events.append(rest)
            rest = ""
        for event in events:
            yield event.strip()


async def read_result(pieces: AsyncIterable[bytes]) -> BenchResult:
    """Reads a stream to its end. Comments and the closing mark are skipped."""
    result = BenchResult()
    async for event in events_of(pieces):
        if not event or event.startswith(":") or event == f"{_DATA}[DONE]":
            continue
        data = json.loads(event.removeprefix(_DATA))
        if choices := data.get("choices"):
            result.num_pieces += 1
            choice = choices[0]
            result.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        elif usage := data.get("usage"):
            result.usage = usage
    return result
