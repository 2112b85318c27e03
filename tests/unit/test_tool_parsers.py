"""Tool parsers: texts of models and the content and calls in them, for every cut of the text."""

import pytest

from router.chat.tool_parsers import tool_parser
from tests.support.chat_parsers import check_cuts, output_of

F1 = ("f", '{"a": 1}')

HERMES = [
    ("", "", []),
    ("Hello, world.", "Hello, world.", []),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', None, [F1]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n', None, [F1]),
    ('Hi.\n<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>', "Hi.\n", [F1]),
    ('\n\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', None, [F1]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call> Bye',
        " Bye",
        [F1, ("g", "{}")],
    ),
    (
        '<tool_call>[{"name":"f","arguments":{"a": 1}}, {"name":"g"}]</tool_call>',
        None,
        [F1, ("g", "{}")],
    ),
    ('<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
    # A string's brackets and marks are text.
    (
        '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\"{"}}</tool_call>',
        None,
        [("f", '{"a": "}</tool_call>\\"{"}')],
    ),
    # Arguments given as a string.
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [F1]),
    (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\ude00\\u00e9\\"}"}',
        None,
        [("f", '{"a": "😀é"}')],
    ),
    ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', None, [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', None, [("f", '"x"')]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", "null")]),
    ('<tool_call>{"name": "\\u00e9", "id": {"x": [1]}, "arguments": {}}', None, [("é", "{}")]),
    # Cut short: content until the call is known, then its arguments as far as they came.
    ("a <tool_c", "a <tool_c", []),
    ("a <tool_call>", "a <tool_call>", []),
    ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ('<tool_call>{"name": "f", "arguments": {"a": [1, "x', None, [("f", '{"a": [1, "x')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', None, [F1]),
    # Malformed.
    ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
    ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    ('<tool_call><tool_call>{"name": "f", "arguments": {"a": 1}}', "<tool_call>", [F1]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', None, [F1]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', None, [F1]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>', None, [("f", '{"a": 1')]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1!}}</tool_call>',
        "!}}</tool_call>",
        [("f", '{"a": 1')],
    ),
]

JSON = [
    ("Hello", "Hello", []),
    ('[{"name": "f", "parameters": {"a": 1}}]', None, [F1]),
    (' {"name": "f", "arguments": {"a": 1}} ', None, [F1]),
    (
        '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": [{}]}}]\n',
        None,
        [F1, ("g", '{"b": [{}]}')],
    ),
    ('[{"name": "f", "parameters": {"a": 1}}, 3]', ", 3]", [F1]),
    ('[{"name": "f", "parameters": {"a": 1}}, {"name": "g"}] x', ', {"name": "g"}] x', [F1]),
    # No calls.
    ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ('{"name": "Ann"}', '{"name": "Ann"}', []),
    ('{"name": "Ann", "parameters": 3}', '{"name": "Ann", "parameters": 3}', []),
    ('See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
    ("[]", "[]", []),
    ("[1, 2]", "[1, 2]", []),
]

TABLES = {"hermes": HERMES, "json": JSON}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [(name, *row) for name, table in TABLES.items() for row in table],
)
def test_content_and_calls(name, text, content, calls):
    check_cuts(output_of(tool_parser(name)), text, (content, None, calls))
