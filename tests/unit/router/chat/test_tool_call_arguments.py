"""Arguments of calls: almost right JSON of models becomes JSON, for every cut of the text."""

import json

import pytest

from router.chat.tool_parsers import forced_tool_parser, tool_parser
from tests.support.chat_parsers import check_cuts, output_of

FORMS = {
    "hermes": '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>',
    "json": '[{{"name": "f", "parameters": {}}}]',
    "llama3_json": '{{"name": "f", "parameters": {}}}',
    "mistral": "[TOOL_CALLS]f{}",
}

ARGUMENTS = [
    # Control characters in strings.
    ('{"a": "x\ny\r\t\x00\x1f"}', '{"a": "x\\ny\\r\\t\\u0000\\u001f"}'),
    ('{"a\n": 1}', '{"a\\n": 1}'),
    ('{"a": "x\\\ny"}', '{"a": "x\\\\\\ny"}'),
    # Words of Python, and numbers that JSON does not allow.
    ('{"a": True, "b": [False, None]}', '{"a": true, "b": [false, null]}'),
    ('{"a": NaN, "b": -Infinity}', '{"a": null, "b": null}'),
    ('{"a": 007, "b": .5, "c": +1, "d": 0x10}', '{"a": 7, "b": 0.5, "c": 1, "d": 16}'),
    ('{"a": 1.50, "b": 1E5, "c": -0}', '{"a": 1.50, "b": 1E5, "c": -0}'),
    ('{"a": ' + "1" * 300 + "}", '{"a": ' + "1" * 300 + "}"),
    # Strings of Python.
    (r"""{'a': 'it\'s "x"\n', 'b': ''}""", r"""{"a": "it's \"x\"\n", "b": ""}"""),
    (r"""{"a": '\x41\u00e9'}""", '{"a": "Aé"}'),
    # Unknown escapes, and half a surrogate pair.
    (r"""{"a": "\d\.\'\x41\u12"}""", r"""{"a": "\\d\\.'\\x41\\u12"}"""),
    (r'{"a": "\/\u00e9\ud83d\ude00"}', r'{"a": "\/\u00e9\ud83d\ude00"}'),
    (r'{"a": "\ud83d", "b": "\ude00x"}', '{"a": "\ufffd", "b": "\ufffdx"}'),
    # Trailing commas, tuples, and missing quotes.
    ('{"a": [1,2,], "b": {"c": 3 , }\n,}', '{"a": [1,2], "b": {"c": 3  }\n}'),
    ('{"a": (1, 2), "b": (3)}', '{"a": [1, 2], "b": 3}'),
    ("{a: 1, b-c: Paris, d: 2026-01-05}", '{"a": 1, "b-c": "Paris", "d": "2026-01-05"}'),
    ("{1: 2}", '{"1": 2}'),
    # Nothing to repair.
    ('{ "a" :\n 1 , "b": [ ] }', '{ "a" :\n 1 , "b": [ ] }'),
    ("{}", "{}"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("written", "arguments"), ARGUMENTS)
def test_arguments_are_json_if_they_can_be_repaired(form, written, arguments):
    json.loads(arguments)
    text = FORMS[form].format(written)
    check_cuts(output_of(tool_parser(form)), text, (None, None, [("f", arguments)]))


@pytest.mark.parametrize(("written", "arguments"), ARGUMENTS)
def test_arguments_of_a_forced_call_are_repaired_too(written, arguments):
    choice = {"type": "function", "function": {"name": "f"}}
    make = output_of(lambda: forced_tool_parser(choice))
    check_cuts(make, written, (None, None, [("f", arguments)]))


@pytest.mark.parametrize(
    ("quoted", "arguments"),
    [
        (r'"{\"a\": \"x\ny\"}"', r'{"a": "x\ny"}'),
        (r'"{\"a\": True, \"b\": [1,],}"', '{"a": true, "b": [1]}'),
        ("\"{'a': 'x'}\"", '{"a": "x"}'),
        ("'{\"a\": 1}'", '{"a": 1}'),
        (r'" {\"a\": 1}\n junk"', '{"a": 1}'),
        (r'"{\"a\": 1!}"', '{"a": 1!}'),
        ('"  "', "{}"),
        ('"a\nb"', r'"a\nb"'),
        ("'a\"'", r'"a\""'),
    ],
)
def test_arguments_given_as_a_string_are_repaired_too(quoted, arguments):
    text = FORMS["hermes"].format(quoted)
    check_cuts(output_of(tool_parser("hermes")), text, (None, None, [("f", arguments)]))


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": "x\\', '{"a": "x'),
        ('{"a": "x\\u12', '{"a": "x'),
        ('{"a": tru', '{"a": tru'),
        ('{"a": 1,', '{"a": 1'),
        ("{'a", '{"a'),
        ("{a", "{a"),
        ('{"a": (1', '{"a": [1'),
    ],
)
def test_arguments_that_are_cut_are_not_completed(written, arguments):
    make = output_of(tool_parser("mistral"))
    check_cuts(make, f"[TOOL_CALLS]f{written}", (None, None, [("f", arguments)]))
