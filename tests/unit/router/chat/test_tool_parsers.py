"""Tool parsers: texts of models and the content and calls in them, for every cut of the text."""

import re

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
    # The first arguments count.
    (
        '<tool_call>{"arguments": {"a": 1}, "arguments": {}, "name": "f", "parameters": {}}',
        None,
        [F1],
    ),
    # Cut short: content until the call is known, then its arguments as far as they came.
    ("a <tool_c", "a <tool_c", []),
    ("a <tool_call>", "a <tool_call>", []),
    ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ('<tool_call>{"name": "f", "arguments": {"a": [1, "x', None, [("f", '{"a": [1, "x')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', None, [F1]),
    # Wrapped, with a fence or with several calls behind one mark.
    (
        '<tool_call>\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\n</tool_call>Bye',
        "Bye",
        [F1],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "g"}</tool_call> Bye',
        " Bye",
        [F1, ("g", "{}")],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"x": 2}</tool_call>',
        '{"x": 2}</tool_call>',
        [F1],
    ),
    ("<tool_call>{'name': 'f', 'arguments': {'a': 1}}</tool_call>", None, [F1]),
    ("<tool_call>{'name': 'f', 'arguments': '{\"a\": 1}'}</tool_call>", None, [F1]),
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
    # Cut between two calls.
    ('[{"name": "f", "parameters": {"a": 1}} ,\n  ', None, [F1]),
    # Fenced.
    ('```json\n[{"name": "f", "parameters": {"a": 1}}]\n```', None, [F1]),
    ('```\n{"name": "f", "parameters": {"a": 1}}\n``` bye', " bye", [F1]),
    ('```json\n{"name": "Ann"}\n```', '```json\n{"name": "Ann"}\n```', []),
    # No calls.
    ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ('{"name": "Ann"}', '{"name": "Ann"}', []),
    ('{"name": "Ann", "parameters": 3}', '{"name": "Ann", "parameters": 3}', []),
    ('See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
    ("[]", "[]", []),
    ("[1, 2]", "[1, 2]", []),
]

TAG = "<|python_tag|>"
START4, END4 = "<|python_start|>", "<|python_end|>"
G2 = ("g", '{"b": 2}')

LLAMA3 = [
    ("Hello; world", "Hello; world", []),
    ('{"name": "f", "parameters": {"a": 1}}', None, [F1]),
    ('{"type": "function", "name": "f", "parameters": {"a": 1}}', None, [F1]),
    (f'{TAG}{{"name": "f", "arguments": {{"a": 1}}}}', None, [F1]),
    (f'Hi {TAG} {{"name": "f", "arguments": {{"a": 1}}}}', "Hi ", [F1]),
    (
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": "{\\"b\\": 2}"}',
        None,
        [F1, G2],
    ),
    (
        f'{TAG}{{"name": "f", "parameters": {{"a": 1}}}};'
        f'{TAG}{{"name": "g", "parameters": {{"b": 2}}}}',
        None,
        [F1, G2],
    ),
    ('{"name": "f", "parameters": {"a": 1}}; bye', "; bye", [F1]),
    # The marks of Llama 4.
    (f'{START4}{{"name": "f", "parameters": {{"a": 1}}}}{END4}', None, [F1]),
    (f'Hi{START4} {{"name": "f", "parameters": {{"a": 1}}}} {END4} bye', "Hi bye", [F1]),
    (f'{START4}{{"name": "f", "parameters": {{"a": 1}}}}<|python_e', None, [F1]),
    (f"{START4}print(1){END4}", f"{START4}print(1){END4}", []),
    # Behind text, and fenced.
    ('Sure! {"name": "f", "parameters": {"a": 1}} bye', "Sure!  bye", [F1]),
    (
        'Sure: [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": 2}}]',
        "Sure: ",
        [F1, G2],
    ),
    (
        'Sure:\n\n```json\n{"name": "f", "parameters": {"a": 1}}\n```\nbye',
        "Sure:\n\n\nbye",
        [F1],
    ),
    (
        '```\n{"name": "f", "parameters": {"a": 1}}\n{"name": "g", "parameters": {"b": 2}}\n```',
        None,
        [F1, G2],
    ),
    ("See ```python\nx = {}\n``` {x}", "See ```python\nx = {}\n``` {x}", []),
    # A part of other JSON is no call, but a call may follow it.
    (
        '{"x": [{"name": "f", "parameters": {}}], "y": 3} {"name": "f", "parameters": {"a": 1}}',
        '{"x": [{"name": "f", "parameters": {}}], "y": 3} ',
        [F1],
    ),
    # No calls.
    (f"{TAG}print(1)", f"{TAG}print(1)", []),
    ('{"a": "<|python', '{"a": "<|python', []),
    ('{"name": "f"}', '{"name": "f"}', []),
    ("{", "{", []),
    (f'{{"a": 1}} {TAG}{{"name": "f", "parameters": {{"a": 1}}}}', '{"a": 1} ', [F1]),
    # Cut short.
    ('{"name": "f", "parameters": {"a"', None, [("f", '{"a"')]),
]

MISTRAL = [
    ("Hello [TOOL", "Hello [TOOL", []),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', None, [F1]),
    (
        'Hi[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name":"g","arguments":{"b": 2}}]',
        "Hi",
        [F1, G2],
    ),
    ('[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', None, [F1]),
    ('[TOOL_CALLS]f{"a": 1}', None, [F1]),
    ('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g {"b": 2}', None, [F1, G2]),
    ('[TOOL_CALLS]f[ARGS]{"a": 1}', None, [F1]),
    ('[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": 2}', None, [F1, G2]),
    ('[TOOL_CALLS]f{"a": 1} bye', " bye", [F1]),
    ('[TOOL_CALLS]f{"a": "[TOOL_CALLS]', None, [("f", '{"a": "[TOOL_CALLS]')]),
    # No calls.
    ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("[TOOL_CALLS]f", "[TOOL_CALLS]f", []),
    ("[TOOL_CALLS]f[ARGS]3", "[TOOL_CALLS]f[ARGS]3", []),
    ("[TOOL_CALLS]{}", "[TOOL_CALLS]{}", []),
    (f'[TOOL_CALLS]{"f" * 257}{{"a": 1}}', f'[TOOL_CALLS]{"f" * 257}{{"a": 1}}', []),
]

PYTHONIC = [
    ("Hello", "Hello", []),
    ("[f(a=1)]", None, [F1]),
    (" [\n f(a=1), g( b = 2, ) ] ", None, [F1, G2]),
    ("[f()]", None, [("f", "{}")]),
    ("[a.f-1(x='y')]", None, [("a.f-1", '{"x": "y"}')]),
    (
        '[f(a=\'it\\\'s\', b="\\n\\x41\\u00e9\\101\\q", c="""x"y""", d=\'\')]',
        None,
        [("f", '{"a": "it\'s", "b": "\\nAéA\\\\q", "c": "x\\"y", "d": ""}')],
    ),
    (
        "[f(a=[1, -2.5, True], b={'k': None, \"l\": {}}, c=0x10, d=1_000, e=[1,], g=false)]",
        None,
        [
            (
                "f",
                '{"a": [1, -2.5, true], "b": {"k": null, "l": {}}, "c": 16, "d": 1000, '
                '"e": [1], "g": false}',
            )
        ],
    ),
    ("[f(a='\\ud83d\\ude00')]", None, [("f", '{"a": "\\ud83d\\ude00"}')]),
    (
        "[f(a=(1, 2), b=('x',), c=(), d=(3))]",
        None,
        [("f", '{"a": [1, 2], "b": ["x"], "c": [], "d": 3}')],
    ),
    (
        "[f(a={1, 2}, b={'x'}, c={(1,)}, d={})]",
        None,
        [("f", '{"a": [1, 2], "b": ["x"], "c": [[1]], "d": {}}')],
    ),
    (
        "[f(a='x' \"y\"\n  \"\"\"z\"\"\", b=('u'\n'v'), c=['w' 'x'])]",
        None,
        [("f", '{"a": "xyz", "b": "uv", "c": ["wx"]}')],
    ),
    (
        "[f(a=r'\\d', b=u'é', c=R'\\'')]",
        None,
        [("f", '{"a": "\\\\d", "b": "é", "c": "\\\\\'"}')],
    ),
    (
        "[f(a=-1, b=-.5, c=+3, d=007, e=1e5, f=12345678901234567890123, g=0.1000000000000000001)]",
        None,
        [
            (
                "f",
                '{"a": -1, "b": -0.5, "c": 3, "d": 7, "e": 1e5, "f": 12345678901234567890123, '
                '"g": 0.1000000000000000001}',
            )
        ],
    ),
    (
        "[f(a=[1, # one\n 2,], # '\n b={'k': 'v',},), # )\n g(b=2),]",
        None,
        [("f", '{"a": [1, 2], "b": {"k": "v"}}'), G2],
    ),
    (
        "[f(a={1: 2, None: 3, 'x': {True: 1.5}})]",
        None,
        [("f", '{"a": {"1": 2, "null": 3, "x": {"true": 1.5}}}')],
    ),
    (
        "[f(a='\\U0001F600', b='\\N{DASH}', c='\\\n', d='\\ud83d')]",
        None,
        [("f", '{"a": "😀", "b": "\\\\N{DASH}", "c": "", "d": "\ufffd"}')],
    ),
    (f"{START4}[f(a=1)]{END4}", None, [F1]),
    ("```python\n[f(a=1)]\n```\nbye", "\nbye", [F1]),
    ("# A\n[f(a=1)]", "# A\n[f(a=1)]", []),
    ("[f(a=1)] bye", " bye", [F1]),
    ("[f(a=1), bye", ", bye", [F1]),
    ("[f(a=1)", None, [F1]),
    # No calls.
    ("[]", "[]", []),
    ("[1, 2]", "[1, 2]", []),
    ("[see](http://x)", "[see](http://x)", []),
    ("[f(1)]", "[f(1)]", []),
    ("[f(x, a=1)]", "[f(x, a=1)]", []),
    ("f(a=1)", "f(a=1)", []),
    # Malformed or cut short.
    ("[f(a=1, b=[2, 'x", None, [("f", '{"a": 1, "b": [2, "x')]),
    ("[f(a=x, b=2)]", ", b=2)]", [("f", '{"a": x')]),
    ("[f(a=1, 2)]", ", 2)]", [("f", '{"a": 1')]),
    ("[f(a=f'x', b=2)]", "'x', b=2)]", [("f", '{"a": f')]),
    ("[f(a=b'x')]", "'x')]", [("f", '{"a": b')]),
    ("[f(a=g(1))]", "(1))]", [("f", '{"a": g')]),
    ("[f(a=[1 2])]", "2])]", [("f", '{"a": [1')]),
    ("[f(a={'x': 1, 'y'})]", "})]", [("f", '{"a": {"x": 1, "y"')]),
    ("[f(a={'x':})]", "})]", [("f", '{"a": {"x": ')]),
    ("[f(a={(1,): 2})]", ": 2})]", [("f", '{"a": {[1]')]),
    ("[f(a=(1, 2", None, [("f", '{"a": [1, 2')]),
    ("[f(a={'x", None, [("f", '{"a": {"x')]),
    ("[f(a=1e999)]", ")]", [("f", '{"a": 1e999')]),
    ("[f(a=" + "[" * 65, "[", [("f", '{"a": ' + "[" * 64)]),
]


def coder_text(value, key="a"):
    return (
        f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


CODER = [
    ("Hello", "Hello", []),
    ("Hi\n" + coder_text("x"), "Hi\n", [("f", '{"a": "x"}')]),
    (coder_text('\n<b>"é\n\n') * 2, None, [("f", '{"a": "\\n<b>\\"é\\n\\n"}')] * 2),
    ("<tool_call><function=f></function></tool_call>", None, [("f", "{}")]),
    (
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b></parameter></function>"
        "<function=g></function></tool_call>",
        None,
        [("f", '{"a": "1", "b": ""}'), ("g", "{}")],
    ),
    # Cut short or malformed.
    ("<tool_call>\n<function=f", "<tool_call>\n<function=f", []),
    ("<tool_call>\n<function=f>", None, [("f", "")]),
    ("<tool_call>\n<function=f><parameter=a>x</par", None, [("f", '{"a": "x</par')]),
    (coder_text("x").removesuffix("call>"), None, [("f", '{"a": "x"}')]),
    (coder_text("x").removesuffix("n>\n</tool_call>"), None, [("f", '{"a": "x"}')]),
    (coder_text("x").removesuffix("\n</function>\n</tool_call>"), None, [("f", '{"a": "x"}')]),
    (coder_text("x")[: -len("/function>\n</tool_call>")] + "para", None, [("f", '{"a": "x"')]),
    # Tags that models forget.
    ("<function=f><parameter=a>x</parameter></function>", None, [("f", '{"a": "x"}')]),
    ("Hi\n" + coder_text("x")[len("<tool_call>\n") :], "Hi\n", [("f", '{"a": "x"}')]),
    (
        "<function=f></function>\n</tool_call> and <function=g>\n</function>",
        " and ",
        [("f", "{}"), ("g", "{}")],
    ),
    (
        "<tool_call><function=f><parameter=a>\nx\n<parameter=b>y</function></tool_call>",
        None,
        [("f", '{"a": "x", "b": "y"}')],
    ),
    (
        "<tool_call><function=f><parameter=a>x</parameter></tool_call>\n" + coder_text("y"),
        None,
        [("f", '{"a": "x"}'), ("f", '{"a": "y"}')],
    ),
    (
        "<tool_call><function=f><parameter=a>x</parameter><function=g></function></tool_call>",
        None,
        [("f", '{"a": "x"}'), ("g", "{}")],
    ),
    (
        "<tool_call><function=f><parameter=a>x\n</function>\n</tool_call>\n" + coder_text("y"),
        None,
        [("f", '{"a": "x"}'), ("f", '{"a": "y"}')],
    ),
    ("<tool_call><function=f></tool_call>", None, [("f", "{}")]),
    ("<tool_call><function=f><parameter=a>x</tool_call>", None, [("f", '{"a": "x"}')]),
    # Tags within a value are text, unless nothing else follows them.
    (coder_text("</function> x"), None, [("f", '{"a": "</function> x"}')]),
    (coder_text("<tool_call></tool_call>"), None, [("f", '{"a": "<tool_call></tool_call>"}')]),
    (coder_text("<parameter=a>x"), None, [("f", '{"a": "<parameter=a>x"}')]),
    (coder_text("<parameter>x"), None, [("f", '{"a": "<parameter>x"}')]),
    # Blanks and quotes around names; a parameter that is written twice.
    (
        "<tool_call><function= \"f\" ><parameter = 'a'\n>x</parameter></function></tool_call>",
        None,
        [("f", '{"a": "x"}')],
    ),
    (
        "<tool_call><function=f><parameter=a>x</parameter><parameter=a>y</parameter></function>",
        None,
        [("f", '{"a": "x", "a": "y"}')],
    ),
    # Text that only mentions a tag.
    ("Write <function=f> first", "Write <function=f> first", []),
    ("<function> <function=f", "<function> <function=f", []),
    ("<tool_call><function=f>x=1</function>", "x=1</function>", [("f", "")]),
    ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
]
TABLES = {
    "hermes": HERMES,
    "json": JSON,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen3_coder": CODER,
}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "integer"}, "12", "12"),
        ({"type": "integer"}, "many", '"many"'),
        ({"type": "number"}, " 1.5 ", "1.5"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "object"}, '{"k": [1, "\\/"]}', '{"k": [1, "/"]}'),
        ({"type": "array"}, "['x', None]", '["x", null]'),
        ({"type": "array"}, "[NaN]", '"[NaN]"'),
        ({"type": "array"}, "[1", '"[1"'),
        ({"$ref": "#/$defs/P"}, '{"k": 1}', '{"k": 1}'),
        ({"type": "string"}, "12", '"12"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", '"12"'),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "12", "12"),
        ({"type": "integer"}, "null", "null"),
        ({}, "12", '"12"'),
    ],
)
def test_schemas_give_the_types_of_parameters(schema, value, expected):
    function = {"name": "f", "parameters": {"properties": {"a": schema}}}
    tools = ({"type": "function", "function": function},)
    make = output_of(lambda: tool_parser("qwen3_coder")(tools))
    check_cuts(make, coder_text(value), (None, None, [("f", f'{{"a": {expected}}}')]))


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [(name, *row) for name, table in TABLES.items() for row in table],
)
def test_content_and_calls(name, text, content, calls):
    check_cuts(output_of(tool_parser(name)), text, (content, None, calls))


@pytest.mark.parametrize("name", ["json", "llama3_json"])
def test_json_that_is_no_call_is_content_as_soon_as_a_key_says_so(name):
    parser = tool_parser(name)()
    assert parser.push('{"name": "Ann", "age').content == ""
    assert parser.push('": 3, ').content == '{"name": "Ann", "age": 3, '


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "a1b2c3d4e"),
        ('[TOOL_CALLS]f{"a": 1}', "[0-9a-zA-Z]{9}"),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}]', "[0-9a-zA-Z]{9}"),
    ],
)
def test_ids_of_mistral_are_the_models_or_have_nine_characters(text, pattern):
    (call,) = tool_parser("mistral")().push(text).tool_calls
    assert re.fullmatch(pattern, call.id)
