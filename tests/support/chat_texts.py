"""Random texts of models with tool calls, and readers of whole texts that share no code with the
parsers.
"""

import ast
import json
import re

WORDS = [
    "Hi",
    "é😀",
    "\u3000",
    "\n",
    " ",
    '"',
    "{",
    "}",
    "[",
    "]",
    "<",
    "tool",
    "f(",
    "a=1)",
    ";",
    "\\",
]
MARKS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<think>", "</think>", "<function=f>", "</function>", "<parameter=a>", "</parameter>",
    "<|python_start|>", "<|python_end|>", "```json\n", "```", "<function= 'f' >",
    '<parameter="b">', '{"name": "f"', '"parameters": {', "True", "'", "(", ")", "#",
]  # fmt: skip
_NAMED_CALL = re.compile(r"\[TOOL_CALLS\]([\w.-]+)(\[CALL_ID\]abc\[ARGS\])?")
_CODER_CALL = (
    r"(?s)<tool_call>\n<function=([\w.-]+)>\n"
    r"((?:<parameter=.+?>\n.*?\n</parameter>\n)*)</function>\n</tool_call>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"anyOf": [{"type": "string"}, {"type": "array"}]},
                    "name": {"$ref": "#/$defs/Name"},
                    "arguments": {"type": "object"},
                },
                "$defs": {"Name": {"enum": ["1", 1, None]}},
            },
        },
    },
    {"type": "function", "function": {"name": "get_weather"}},
]
NAMES = ["f", "get_weather", "a.b", "x-1"]


def random_value(rng, depth=0):
    kinds = ["text", "text", "number", "word"] + ["list", "object"] * (depth < 3)
    match rng.choice(kinds):
        case "text":
            return "".join(
                rng.choices([*WORDS, *MARKS, "\t", "'", "/", "\x7f"], k=rng.randrange(4))
            )
        case "number":
            return rng.choice([0, -1, 12, 1.5, -2e-7, 10**20])
        case "word":
            return rng.choice([True, False, None])
        case "list":
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return random_arguments(rng, depth + 1)


def random_arguments(rng, depth=0):
    return {
        rng.choice(["a", "b", "name", "arguments", "c_1"]): random_value(rng, depth)
        for _ in range(rng.randrange(3))
    }


def random_calls(rng, depth=0):
    """Returns names and arguments; at a depth of 3, values have no lists and objects."""
    num_calls = rng.randrange(1, 4)
    return [(rng.choice(NAMES), random_arguments(rng, depth)) for _ in range(num_calls)]


def random_text_calls(rng, depth=0):
    """Returns calls whose values are texts without end tags."""
    calls = random_calls(rng, depth)
    return [
        (name, {key: _without_tags(str(value)) for key, value in arguments.items()})
        for name, arguments in calls
    ]


def _without_tags(value):
    return value.replace("</parameter>", "").replace("<parameter=", "")


def almost_json(rng, value):
    """JSON with mistakes that models make, of which it is clear what they stand for."""
    match value:
        case dict():
            items = [
                f"{almost_json(rng, key)}:{rng.choice(['', ' '])}{almost_json(rng, item)}"
                for key, item in value.items()
            ]
            return f"{{{_joined_items(rng, items)}}}"
        case list():
            brackets = "()" if len(value) > 1 and rng.random() < 0.3 else "[]"
            items = [almost_json(rng, item) for item in value]
            return f"{brackets[0]}{_joined_items(rng, items)}{brackets[1]}"
        case str():
            if rng.random() < 0.3:
                return repr(value)
            return json.dumps(value, ensure_ascii=False).replace("\\n", rng.choice(["\n", "\\n"]))
    return rng.choice([repr, json.dumps])(value)


def _joined_items(rng, items):
    last = rng.choice(["", "", ",", ", \n"]) if items else ""
    return rng.choice([",", ", ", " , "]).join(items) + last


def python_literal(rng, value):
    """A literal of Python for a value, in one of its many forms."""
    match value:
        case dict():
            items = [f"{key!r}: {python_literal(rng, item)}" for key, item in value.items()]
            return f"{{{_joined_literals(rng, items)}}}"
        case list():
            items = [python_literal(rng, item) for item in value]
            joined = _joined_literals(rng, items)
            if rng.random() < 0.5:
                return f"[{joined}]"
            return f"({items[0]},)" if len(items) == 1 else f"({joined})" if items else "()"
        case str() if rng.random() < 0.3:
            middle = rng.randrange(len(value) + 1)
            halves = f"{value[:middle]!r} {value[middle:]!r}"
            return rng.choice([halves, f"({halves})"])
    return repr(value)


def _joined_literals(rng, items):
    last = rng.choice(["", "", ","]) if items else ""
    return rng.choice([", ", ",", ", # one ' )\n"]).join(items) + last


def json_text(rng, value):
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))


def call_object(rng, name, arguments, keys=("arguments",)):
    if rng.random() < 0.2:
        arguments = json.dumps(arguments)
    members = [("name", name), (rng.choice(keys), arguments)]
    if rng.random() < 0.2:
        members.reverse()
    if rng.random() < 0.2:
        members.insert(rng.randrange(3), ("id", "x"))
    return json_text(rng, dict(members))


def hermes_text(rng, calls):
    space = rng.choice(["", "\n"])
    texts = [f"<tool_call>{space}{call_object(rng, *c)}{space}</tool_call>" for c in calls]
    return rng.choice(["", "Hi.\n"]) + rng.choice(["", "\n"]).join(texts)


def json_array_text(rng, calls):
    texts = [call_object(rng, *call, keys=("parameters", "arguments")) for call in calls]
    if len(calls) == 1 and rng.random() < 0.5:
        return texts[0]
    return f"[{', '.join(texts)}]"


_AROUND_LLAMA_CALLS = [
    ("", ""), ("<|python_tag|>", ""), ("<|python_start|>", "<|python_end|>"), ("Sure: ", "."),
    ("```json\n", "\n```"), ("Sure:\n```\n", "\n```\nBye"),
]  # fmt: skip


def llama3_text(rng, calls):
    texts = [call_object(rng, *call, keys=("parameters", "arguments")) for call in calls]
    start, end = rng.choice(_AROUND_LLAMA_CALLS)
    return start + rng.choice([";", "; "]).join(texts) + end


def mistral_text(rng, calls):
    match rng.randrange(3):
        case 0:
            return f"[TOOL_CALLS] [{', '.join(call_object(rng, *call) for call in calls)}]"
        case 1:
            return "".join(f"[TOOL_CALLS]{name}{json_text(rng, value)}" for name, value in calls)
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]abc[ARGS]{json_text(rng, value)}" for name, value in calls
    )


def pythonic_text(rng, calls):
    def call_text(name, arguments):
        values = [f"{key}={python_literal(rng, value)}" for key, value in arguments.items()]
        return f"{name}({_joined_literals(rng, values)})"

    return f"[{rng.choice([', ', ',']).join(call_text(*call) for call in calls)}]"


def qwen3_coder_text(rng, calls):
    def call_text(name, arguments):
        values = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(call_text(*call) for call in calls)


TEXTS = {
    "hermes": hermes_text,
    "json": json_array_text,
    "llama3_json": llama3_text,
    "mistral": mistral_text,
    "pythonic": pythonic_text,
    "qwen3_coder": qwen3_coder_text,
}


def damaged(rng, text):
    """Cuts a text short, or leaves out, repeats or inserts a part."""
    start = rng.randrange(len(text) + 1)
    end = rng.randrange(start, len(text) + 1)
    match rng.randrange(4):
        case 0:
            return text[:start]
        case 1:
            return text[:start] + text[min(end, start + 3) :]
        case 2:
            return text[:end] + text[start:]
    return text[:start] + rng.choice([*WORDS, *MARKS]) + text[start:]


def json_calls_of(value):
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        arguments = call.get("parameters", call.get("arguments"))
        is_text = isinstance(arguments, str)
        yield call["name"], json.loads(arguments) if is_text else arguments


def whole_calls(name, text):
    """Returns the calls in a complete, well-formed text, by the readers of Python's library."""
    if name == "json":
        return list(json_calls_of(json.loads(text)))
    if name == "pythonic":
        calls = ast.parse(re.sub(r"(?<=\bx)-(?=1\()", "__", text)).body[0].value.elts
        return [
            (
                ast.unparse(call.func).replace("__", "-"),
                json.loads(json.dumps({w.arg: ast.literal_eval(w.value) for w in call.keywords})),
            )
            for call in calls
        ]
    if name == "qwen3_coder":
        return [
            (call[1], dict(re.findall(r"(?s)<parameter=(.+?)>\n(.*?)\n</parameter>", call[2])))
            for call in re.finditer(_CODER_CALL, text)
        ]
    mark = {"hermes": "<tool_call>", "llama3_json": "", "mistral": "[TOOL_CALLS]"}[name]
    return list(_marked_calls(text, mark))


def _marked_calls(text, mark):
    position = 0
    while True:
        position = text.find(mark, position) if mark else position
        start = re.compile(r"[^\[{]*").match(text, max(position, 0) + len(mark)).end()
        if position < 0 or start == len(text):
            return
        named = _NAMED_CALL.match(text, position)
        start = named.end() if named else start
        value, position = json.JSONDecoder(strict=False).raw_decode(text, start)
        yield from [(named[1], value)] if named else json_calls_of(value)


CALLS = dict.fromkeys(TEXTS, random_calls) | {"qwen3_coder": random_text_calls}
"""Makes calls that a format can have."""
