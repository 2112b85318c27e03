"""Answers of OpenAI's client, whole and streamed, in one comparable form."""

import json
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from baton.common.model_files.named_models import demo_model_path
from tests.support.kernel_checks import IS_NATIVE

_PUNCTUATION = str.maketrans("", "", '{}[]:,"')


def whitespace_bias() -> dict[str, int]:
    """A `logit_bias` that forbids the demo model's tokens of whitespace and punctuation. A small
    model would otherwise write JSON that is mostly whitespace.
    """
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    texts = {
        token_id: tokenizer.decode([token_id], skip_special_tokens=False)
        for token_id in range(tokenizer.get_vocab_size())
    }
    return {
        str(token_id): -100
        for token_id, text in texts.items()
        if text.translate(_PUNCTUATION).isspace()
    }


async def both_completions(
    client: openai.AsyncOpenAI, **fields: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """Asks for completions, whole and streamed; checks that both are the same.

    Returns:
        The whole answer, and its choices.
    """
    whole = await client.completions.create(**fields)
    choices = [choice.model_dump() for choice in whole.choices]
    stream = await client.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    joined: dict[int, dict[str, Any]] = {}
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = choice.model_dump()
            _add_piece(joined.setdefault(piece["index"], {}), piece)
    assert [joined[index] for index in sorted(joined)] == _comparable(choices)
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    return whole, choices


def _add_piece(known: dict[str, Any], piece: dict[str, Any]) -> None:
    """Joins texts and lists; other fields are the last ones that are set."""
    for name, value in piece.items():
        old = known.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            _add_piece(old, value)
        elif isinstance(value, str | list) and old is not None and name != "finish_reason":
            known[name] = old + value
        elif value is not None or name not in known:
            known[name] = value


async def both_chats(client: openai.AsyncOpenAI, **fields: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Asks for a chat's answers, whole and streamed; checks that both are the same.

    Returns:
        The whole answer, and its choices' messages with finish reasons and log-probabilities.
    """
    whole = await client.chat.completions.create(**fields)
    choices = [
        {
            "content": choice.message.content or "",
            "reasoning": getattr(choice.message, "reasoning", None) or "",
            "calls": [_call(call.function) for call in choice.message.tool_calls or ()],
            "finish_reason": choice.finish_reason,
            "logprobs": [entry.model_dump() for entry in _entries(choice)],
        }
        for choice in whole.choices
    ]
    stream = await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    assert await _joined(stream, len(choices)) == _comparable(choices)
    return whole, choices


def _comparable(value: Any) -> Any:
    """Returns the same; numbers equal those near them where torch computes, since the last bits of
    its log-probabilities depend on the batch.
    """
    if isinstance(value, dict):
        return {name: _comparable(field) for name, field in value.items()}
    if isinstance(value, list):
        return [_comparable(element) for element in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) and not IS_NATIVE else value


def _entries(choice: Any) -> list[Any]:
    return choice.logprobs.content if choice.logprobs else []


def _call(function: Any) -> tuple[str, Any]:
    return function.name, json.loads(function.arguments)


async def _joined(stream: Any, num_choices: int) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = [
        {"content": "", "reasoning": "", "calls": {}, "finish_reason": None, "logprobs": []}
        for _ in range(num_choices)
    ]
    async for chunk in stream:
        for piece in chunk.choices:
            known = choices[piece.index]
            known["content"] += piece.delta.content or ""
            known["reasoning"] += getattr(piece.delta, "reasoning", None) or ""
            for call in piece.delta.tool_calls or ():
                name, arguments = known["calls"].get(call.index, ("", ""))
                function = call.function
                known["calls"][call.index] = (
                    name + (function.name or ""),
                    arguments + (function.arguments or ""),
                )
            known["finish_reason"] = piece.finish_reason or known["finish_reason"]
            known["logprobs"] += [entry.model_dump() for entry in _entries(piece)]
    for known in choices:
        known["calls"] = [(name, json.loads(text)) for name, text in known["calls"].values()]
    return choices
