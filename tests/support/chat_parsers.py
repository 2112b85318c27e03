"""Runs tool and reasoning parsers over texts that are cut into pieces."""

import json
import sys

from router.chat.output import ChatOutput, whole_answer

CALL_ID = "id"


def answer_of(make_output, pieces):
    """Returns the whole answer as a tuple: content, reasoning, (name, arguments) of the calls."""
    answer, _ = deltas_and_answer(make_output, pieces)
    return answer


def deltas_and_answer(make_output, pieces):
    output = make_output()
    deltas = [output.push(piece) for piece in pieces]
    deltas.append(output.finish())
    answer = whole_answer(deltas)
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    assert output.has_tool_calls == bool(calls)
    assert output.ends_in_calls == bool(calls and is_json(calls[-1][1]))
    check_calls(deltas)
    return (answer.content, answer.reasoning, calls), deltas


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def check_calls(deltas):
    """The first delta of a call, and no other, has its id and name; calls come one by one."""
    begun = 0
    for delta in deltas:
        for call in delta.tool_calls:
            is_first = call.index == begun
            begun += is_first
            assert call.index == begun - 1
            assert (call.id is not None) == (call.name is not None) == is_first


def output_of(tools=None, reasoning=None, **kwargs):
    """Returns a function that makes outputs of new parsers."""
    return lambda: ChatOutput(reasoning and reasoning(), tools and tools(), **kwargs)


def cuts(text):
    """Every way to cut a text into two pieces, and the text character by character."""
    yield from ((text[:i], text[i:]) for i in range(len(text) + 1))
    yield tuple(text)


def check_cuts(make_output, text, expected):
    for pieces in cuts(text):
        assert answer_of(make_output, pieces) == expected, pieces


def num_calls_of(function, *args):
    """Returns how many functions, those of Python's library included, a function calls."""
    num_calls = 0

    def count(frame, event, arg):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return num_calls
