"""Tool parsers over random texts: right calls, and the same answer for every cut of the text."""

import json
import random

import pytest

from router.chat.reasoning_parsers import reasoning_parser
from router.chat.tool_parsers import tool_parser
from tests.support.chat_parsers import answer_of, cuts, num_calls_of, output_of
from tests.support.chat_round_trips import FORMATS, answer_text, random_message
from tests.support.chat_texts import (
    CALLS,
    MARKS,
    TEXTS,
    TOOLS,
    WORDS,
    almost_json,
    damaged,
    random_arguments,
    random_calls,
    whole_calls,
)

_MAX_CUTS = 110
"""Longer texts are cut at random places and character by character only."""


def texts(name, num):
    """Yields texts of every kind: well-formed, damaged, and of words and marks."""
    for seed in range(num):
        rng = random.Random(f"{name} {seed}")
        text = TEXTS[name](rng, CALLS[name](rng, depth=seed % 4)[: 1 + seed % 2])
        for _ in range(seed % 3):
            text = damaged(rng, text)
        if seed % 5 == 0:
            text = "".join(rng.choices(WORDS + MARKS, k=6)) + text
        yield rng, text


def random_pieces(rng, text):
    ends = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 8)))
    return [text[i:j] for i, j in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("num_texts", [30, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEXTS)
def test_the_answer_does_not_depend_on_the_cut(name, num_texts):
    makes = [
        output_of(lambda tools=tools: tool_parser(name)(tools), reasoning_parser("qwen3"))
        for tools in ((), TOOLS)
    ]
    for i, (rng, text) in enumerate(texts(name, num_texts)):
        make = makes[i % 2]
        expected = answer_of(make, [text])
        for _ in range(5):
            pieces = random_pieces(rng, text)
            assert answer_of(make, pieces) == expected, pieces
        assert answer_of(make, text) == expected, text
        for pieces in cuts(text) if len(text) < _MAX_CUTS else ():
            assert answer_of(make, pieces) == expected, pieces


@pytest.mark.parametrize("name", TEXTS)
def test_well_formed_calls_are_found(name):
    for seed in range(200):
        rng = random.Random(f"{name} {seed}")
        calls = CALLS[name](rng)
        text = TEXTS[name](rng, calls)
        _, _, found = answer_of(output_of(tool_parser(name)), [text])
        found = [(name, json.loads(arguments)) for name, arguments in found]
        assert found == calls == whole_calls(name, text), text


@pytest.mark.parametrize("start", ["[TOOL_CALLS]f", '[TOOL_CALLS]{"name": "f", "arguments": '])
def test_almost_right_arguments_become_json(start):
    make = output_of(tool_parser("mistral"))
    for seed in range(200):
        rng = random.Random(seed)
        arguments = random_arguments(rng)
        text = start + almost_json(rng, arguments)
        answer = answer_of(make, [text])
        ((_, found),) = answer[2]
        assert json.loads(found) == arguments, text
        assert answer_of(make, random_pieces(rng, text)) == answer_of(make, text) == answer
        for end in range(len(start) + 1, len(text)):
            ((_, begun),) = answer_of(make, [text[:end]])[2]
            assert is_beginning(begun, found), text[:end]


def is_beginning(begun, found):
    """A word that is cut is written as it is, since it may be the beginning of another one."""
    return found.startswith(begun.rstrip("TrueFalsNon"))


STARTS = {
    "deepseek_v3": "<\uff5ctool\u2581call\u2581begin\uff5c>f<\uff5ctool\u2581sep\uff5c>",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="a">',
    "gemma4": "<|tool_call>call:f",
    "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "granite": '<|tool_call|>[{"name": "f", "arguments": ',
    "hermes": '<tool_call>{"name": "f", "arguments": ',
    "json": '[{"name": "f", "parameters": ',
    "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
    "lfm2": "<|tool_call_start|>[f(a=",
    "llama3_json": '{"name": "f", "parameters": ',
    "mistral": "[TOOL_CALLS]f",
    "olmo3": "<function_calls>f(a=",
    "openai": "<|channel|>commentary to=functions.f<|message|>",
    "pythonic": "[f(a=",
    "qwen3_coder": "<tool_call><function=f><parameter=a>",
}


def long_texts(name):
    """Texts without an end: content, and the arguments of a call."""
    long_string = '{"a": "' + "<tool [é] \\n" * 400
    many_items = '{"a": [' + '{"b": [1, "x"]}, ' * 300
    yield "a <tool [é] " * 400
    yield STARTS[name] + long_string
    yield STARTS[name] + many_items
    yield STARTS[name] + " " * 4000


@pytest.mark.parametrize("name", STARTS)
def test_work_per_character_is_constant(name):
    """Every step is bounded: it looks at the piece and at unread text, of which there is little."""
    for text in long_texts(name):
        parser = tool_parser(name)()
        costs = []
        for piece in text:
            costs.append(num_calls_of(parser.push, piece))
            assert parser.text.num_unread < 30  # as long as the longest tag
        middle = len(costs) // 2
        assert sum(costs[middle:]) < 1.2 * sum(costs[:middle]) + 1000


def round_trips(name, num):
    """Yields random answers, and their texts as the family's template writes them."""
    for seed in range(num):
        rng = random.Random(f"{name} {seed}")
        message = random_message(rng, name)
        yield rng, message, answer_text(name, *message)


def format_output(name, tools=()):
    reasoning = FORMATS[name].reasoning
    return output_of(
        lambda: tool_parser(name)(tools), reasoning_parser(reasoning) if reasoning else None
    )


@pytest.mark.parametrize("name", FORMATS)
def test_answers_are_read_as_templates_write_them(name):
    make = format_output(name)
    for rng, (reasoning, content, calls), text in round_trips(name, 100):
        answer = answer_of(make, [text])
        found = [(name, json.loads(arguments)) for name, arguments in answer[2]]
        assert found == calls, text
        assert (answer[1] or "").strip() == reasoning.strip(), text
        assert (answer[0] or "").strip() == content.strip(), text
        assert answer_of(make, random_pieces(rng, text)) == answer == answer_of(make, text)


WRITERS = sorted(
    {*FORMATS, *TEXTS, "glm4_0414"}
    - {"deepseek_v32", "gemma4", "glm45", "minimax_m2", "openai", "qwen3_coder", "seed_oss"}
)


@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_read_as_they_are_written(name):
    for seed in range(50):
        calls = random_calls(random.Random(f"{name} {seed}"))
        text = tool_parser(name).write_calls(calls)
        content, _, found = answer_of(output_of(tool_parser(name)), [text])
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls, text
        assert content is None


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(TEXTS)))
def test_answers_of_families_do_not_depend_on_the_cut(name):
    for i, (rng, _, written) in enumerate(round_trips(name, 30)):
        text = written
        for _ in range(i % 3):
            text = damaged(rng, text)
        make = format_output(name, TOOLS if i % 2 else ())
        expected = answer_of(make, [text])
        for pieces in (*(random_pieces(rng, text) for _ in range(5)), text):
            assert answer_of(make, pieces) == expected, pieces
        for pieces in cuts(text) if len(text) < _MAX_CUTS else ():
            assert answer_of(make, pieces) == expected, pieces
