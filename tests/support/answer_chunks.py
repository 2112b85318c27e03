"""Chunks of random answers, as a chat service with parsers emits them; checks against the types
of the official clients."""

import functools
import itertools
import json

from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from baton.common.request.answer import CandidateOutput, ChatDelta, TokenCounts, ToolCallDelta
from baton.v1 import common_pb2

USAGE = TokenCounts(prompt_tokens=20, cached_tokens=16, completion_tokens=9, reasoning_tokens=4)

_TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
_ARGUMENTS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.one_of(st.integers(-9, 9), st.text(max_size=6), st.lists(st.booleans(), max_size=2)),
    max_size=3,
).map(json.dumps)


def chunk(content="", reasoning="", calls=(), **fields):
    delta = ChatDelta(content=content, reasoning=reasoning, tool_calls=tuple(calls))
    return CandidateOutput(delta=delta, **fields)


def end_chunk(finish_reason="stop", **fields):
    return chunk(finish_reason=finish_reason, usage=USAGE, **fields)


@st.composite
def _deltas(draw):
    """Reasoning, then text and calls in any order, cut into pieces."""
    pieces = [ChatDelta(reasoning=text) for text in draw(st.lists(_TEXTS, max_size=3))]
    num_calls = 0
    for is_call in draw(st.lists(st.booleans(), max_size=5)):
        if not is_call:
            pieces.append(ChatDelta(content=draw(_TEXTS)))
            continue
        text = draw(_ARGUMENTS)
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
        texts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        for i, part in enumerate(texts):
            first = {"id": f"call_{num_calls}", "name": "f"} if i == 0 else {}
            call = ToolCallDelta(num_calls, arguments=part, **first)
            pieces.append(ChatDelta(tool_calls=(call,)))
        num_calls += 1
    return pieces


def _joined(first, second):
    """Both deltas as one, as a parser returns them for a longer piece of text."""
    calls = list(first.tool_calls)
    for call in second.tool_calls:
        if calls and calls[-1].index == call.index:
            last = calls.pop()
            arguments = last.arguments + call.arguments
            calls.append(ToolCallDelta(call.index, last.id, last.name, arguments))
        else:
            calls.append(call)
    return ChatDelta(
        first.content + second.content, first.reasoning + second.reasoning, tuple(calls)
    )


@st.composite
def answers(draw):
    """The chunks of an answer, and how it ended."""
    deltas = [ChatDelta()]
    for piece in draw(_deltas()):
        if draw(st.booleans()):
            deltas[-1] = _joined(deltas[-1], piece)
        else:
            deltas.append(piece)
    reason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    if reason == "length" and draw(st.booleans()):
        deltas = deltas[: draw(st.integers(1, len(deltas)))]
    chunks = [chunk(d.content, d.reasoning, d.tool_calls) for d in deltas]
    stop = draw(st.sampled_from([None, "END", 2])) if reason == "stop" else None
    return [*chunks, end_chunk(reason, matched_stop=stop)]


def token_logprobs(logprob=-0.5):
    return common_pb2.TokenLogprobs(
        logprob=logprob, rank=1, top_token_ids=[1, 2], top_logprobs=[-0.5, -1.5]
    )


def check_type(kind, value, allowed=frozenset()):
    """Parses a value as a type of an official client; fields that the type lacks are an error.

    `allowed`: names of further fields, which the server sends but the type does not have.
    """
    parsed = _adapter(kind).validate_python(value)
    unknown = _unknown_fields(parsed) - allowed
    assert not unknown, unknown
    return parsed


@functools.cache
def _adapter(kind):
    return TypeAdapter(kind)


def _unknown_fields(value):
    if isinstance(value, BaseModel):
        fields = [getattr(value, name) for name in type(value).model_fields]
        return set(value.model_extra or ()).union(*map(_unknown_fields, fields))
    if isinstance(value, list):
        return set().union(*map(_unknown_fields, value))
    return set()
