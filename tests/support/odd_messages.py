"""Protobuf messages that are almost right, by a seeded generator over their descriptors."""

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.v1 import generation_pb2
from tests.support.odd_json import json_bytes, mutated
from tests.support.odd_requests import MESSAGES, TOOLS

_TEXTS = ("", " ", "Hi", "a", "\x00", "é😀", "{", '{"type":"object"}', "x" * 300, "ab " * 2000)
_INTEGERS = (0, 1, 2, 3, 5, 8, 64, 65, 999, 1000, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, 0.5, 1.0, 2.0, -1.0, 1e300, -1e300, 5e-324, float("nan"), float("inf"))
_KINDS = FieldDescriptor
_MAX_DEPTH = 4


def odd_message(rng: random.Random, kind: type[Message]) -> Message:
    """A message whose fields have any values, often at limits."""
    message = kind()
    _fill(rng, message, 0)
    return message


def odd_bytes(rng: random.Random, message: Message) -> bytes:
    """The bytes of a message; one in ten is torn or changed."""
    data = bytearray(message.SerializeToString())
    if rng.random() < 0.9:
        return bytes(data)
    for _ in range(rng.randint(0, 3)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randint(0, len(data))] if rng.random() < 0.5 else data)


def odd_generate_request(rng: random.Random) -> generation_pb2.GenerateRequest:
    """A request for a completion that is right but for a few fields."""
    message = generation_pb2.GenerateRequest(text="Hi")
    message.stopping.max_tokens = rng.choice((1, 2, 5))
    match rng.randrange(6):
        case 0:
            message.token_ids.ids.extend(rng.choice(([5, 6], [1000], [0] * 50, list(range(50)))))
        case 1:
            for _ in range(rng.choice((1, 2, 5, 257))):
                message.prompts.prompts.add(text=rng.choice(("a", "b", "")))
        case 2 | 3:
            _fill_chat(rng, message.chat)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        part = rng.choice((message, message.sampling, message.stopping, message.text_params))
        _set(rng, part, rng.choice(part.DESCRIPTOR.fields), 1)
    return message


def _fill_chat(rng: random.Random, chat: generation_pb2.Chat) -> None:
    texts: dict[str, Any] = {
        "messages_json": rng.choice(MESSAGES),
        "tools_json": TOOLS,
        "documents_json": [{"title": "a"}],
        "chat_template_kwargs_json": {"mood": "good"},
    }
    for name, value in texts.items():
        if name == "messages_json" or rng.random() < 0.3:
            odd = mutated(rng, value) if rng.random() < 0.5 else value
            setattr(chat, name, json_bytes(rng, odd).decode(errors="replace"))
    if rng.random() < 0.3:
        chat.add_generation_prompt = rng.random() < 0.5
    chat.continue_final_message = rng.random() < 0.2


def _fill(rng: random.Random, message: Message, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.3:
            _set(rng, message, field, depth)


def _set(rng: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        values = getattr(message, field.name)
        values[_scalar(rng, field.message_type.fields_by_name["key"])] = _scalar(
            rng, field.message_type.fields_by_name["value"]
        )
    elif field.is_repeated:
        values = getattr(message, field.name)
        for _ in range(rng.choice((0, 1, 2, 5, 20))):
            if field.message_type is None:
                values.append(_scalar(rng, field))
            elif depth < _MAX_DEPTH:
                _fill(rng, values.add(), depth + 1)
    elif field.message_type is None:
        setattr(message, field.name, _scalar(rng, field))
    elif depth < _MAX_DEPTH:
        part = getattr(message, field.name)
        part.SetInParent()
        _fill(rng, part, depth + 1)


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    match field.type:
        case _KINDS.TYPE_STRING:
            return rng.choice(_TEXTS)
        case _KINDS.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 32)))
        case _KINDS.TYPE_BOOL:
            return rng.random() < 0.5
        case _KINDS.TYPE_FLOAT | _KINDS.TYPE_DOUBLE:
            value = rng.choice(_FLOATS)
            return value if field.type == _KINDS.TYPE_DOUBLE or abs(value) < 1e38 else 0.25
        case _KINDS.TYPE_ENUM:
            return rng.choice((0, 1, 2, 99))
        case _KINDS.TYPE_UINT64:
            return rng.choice(_INTEGERS)
        case _KINDS.TYPE_UINT32:
            return min(rng.choice(_INTEGERS), 2**32 - 1)
        case _KINDS.TYPE_INT64 | _KINDS.TYPE_SINT64:
            return min(rng.choice(_INTEGERS), 2**63 - 1) * rng.choice((1, -1))
    return min(rng.choice(_INTEGERS), 2**31 - 1) * rng.choice((1, -1))
