"""Forms of answers that may have calls: what each parser's calls are, beside a stated form."""

import json

import pytest

from baton.common.errors import InvalidArgumentError
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.backends import compile_with
from engine.constraints.hints import change_hints, repair_schema
from engine.constraints.matcher import Constraint
from router.chat.call_forms import form_or_calls, strict_calls
from router.chat.tool_parsers import tool_parser
from tests.support.constraints import BACKENDS, backend_of, vocabulary_of

KIND = "byte_level"
TEXT = {"type": "string"}
WEATHER = {"type": "object", "properties": {"city": TEXT}, "required": ["city"]}
ADD = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/X"}, "tags": {"type": "array", "uniqueItems": True}},
    "required": ["x"],
    "$defs": {"X": {"type": "integer"}},
}
PERSON = {
    "type": "object",
    "properties": {"name": TEXT, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def tool(name, parameters, **function):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


def seek(name):
    """One of DeepSeek's tokens."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


TOOLS = [tool("weather", WEATHER), tool("add", ADD)]
CALL, SEP, CALL_END = seek("tool call begin"), seek("tool sep"), seek("tool call end")
LIST, LIST_END = seek("tool calls begin"), seek("tool calls end")
KIMI_LIST, KIMI_CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions."
KIMI_SEP = "<|tool_call_argument_begin|>"
DSML = "\uff5cDSML\uff5c"
CALLS = {
    "hermes": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '<tool_call>{"name":"add","arguments":{"x":1}}</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": ""}}\n</tool_call>',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
        "</tool_call>",
        "<tool_call>\n<function=add>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=weather>\n</function>\n</tool_call>",
    ],
    "mistral": [
        '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
        '[TOOL_CALLS]weather{"city": "Oslo"}[TOOL_CALLS]add{"x":1}',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
    ],
    "llama3_json": [
        '{"name": "weather", "parameters": {"city": "Oslo"}}',
        '{"name": "weather", "parameters": {"city": "a"}}; {"name":"add","parameters":{"x":1}}',
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}',
    ],
    "json": [
        '[{"name": "weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "add", "parameters": {"x": 1}}]',
        '{"name": "weather", "arguments": {"city": "Oslo"}}',
    ],
    "pythonic": ['[weather(city="Oslo")]', '[weather(city="Oslo"), add(x=1)]'],
    "deepseek_v3": [
        f'{LIST}{CALL}function{SEP}weather\n```json\n{{"city": "Oslo"}}\n```{CALL_END}{LIST_END}',
        f'{LIST}{CALL}function{SEP}weather\n```json\n{{"city": "Oslo"}}\n```{CALL_END}\n'
        f'{CALL}function{SEP}add\n```json\n{{"x": 1}}\n```{CALL_END}{LIST_END}',
    ],
    "deepseek_v31": [
        f'{LIST}{CALL}weather{SEP}{{"city": "Oslo"}}{CALL_END}{LIST_END}',
        f'{LIST}{CALL}weather{SEP}{{"city": "Oslo"}}{CALL_END}'
        f'{CALL}add{SEP}{{"x": 1}}{CALL_END}{LIST_END}',
    ],
    "deepseek_v32": [
        f'<{DSML}function_calls>\n<{DSML}invoke name="weather">\n'
        f'<{DSML}parameter name="city" string="true">Oslo</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}function_calls>",
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        '</invoke>\n<invoke name="add">\n</invoke>\n</minimax:tool_call>',
    ],
    "seed_oss": [
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n"
        "</seed:tool_call>",
    ],
    "granite": [
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]',
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]'
        '<|tool_call|>[{"name": "add", "arguments": {"x": 1}}]',
    ],
    "phi4_mini_json": [
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>',
    ],
    "glm45": [
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
        "<tool_call>add<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>\n"
        "<tool_call>add\n</tool_call>",
    ],
    "kimi_k2": [
        f'{KIMI_LIST}{KIMI_CALL}weather:0{KIMI_SEP}{{"city": "Oslo"}}<|tool_call_end|>'
        f'{KIMI_CALL}add:1{KIMI_SEP}{{"x": 1}}<|tool_call_end|><|tool_calls_section_end|>',
    ],
    "lfm2": ['<|tool_call_start|>[weather(city="Oslo"), add(x=1)]<|tool_call_end|>'],
    "olmo3": ['<function_calls>\nweather(city="Oslo")\nadd(x=1)\n</function_calls>'],
    "gemma4": [
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>',
        "<|tool_call>call:add{x:1}<tool_call|><|tool_call>call:add{x:1}<tool_call|>",
    ],
}
WITH_JSON = [name for name, texts in CALLS.items() if '"city":' in texts[0]]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def compiled(outputs, backend):
    """A function that says whether a text has a form, compiled as in the compile process."""
    backends = {name: backend_of(name, KIND) for name in BACKENDS}
    compiled = compile_with(backends, backend, change_hints(outputs, repair_schema))
    constraint = Constraint(
        backends[compiled.backend].load(compiled.data), vocabulary_of(KIND), "f"
    )
    tokens = vocabulary_of(KIND).byte_tokens

    def accepts(text):
        matcher = constraint.new_matcher(())
        return matcher.replay(tokens[byte] for byte in text.encode()) and matcher.may_stop

    return accepts


def either(form, parser="hermes", tools=TOOLS, **options):
    syntax = tool_parser(parser).syntax
    return form_or_calls(form, tools, syntax, **({"parallel_tool_calls": True} | options))


@each_backend
@pytest.mark.parametrize("parser", CALLS)
def test_an_answer_has_the_stated_form_or_is_calls(backend, parser):
    accepts = compiled(either(StructuredOutputs(json=PERSON), parser), backend)
    for text in (*CALLS[parser], '{"name":"Bob","age":3}', '{"name": "weather", "age": 3}'):
        assert accepts(text), text
    for text in ("hello", '{"name":"Bob","age":"3"}', '{"name":"Bob"}', ""):
        assert not accepts(text), text
    if parser in WITH_JSON:
        assert not accepts(CALLS[parser][0].replace('"city"', '"town"'))
        assert not accepts(CALLS[parser][0].replace("weather", "other"))


@each_backend
def test_the_calls_may_be_limited_to_one(backend):
    form = either(StructuredOutputs(json=PERSON), parallel_tool_calls=False)
    accepts = compiled(form, backend)
    assert accepts(CALLS["hermes"][0])
    assert not accepts(CALLS["hermes"][1])


@each_backend
@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"json_object": True}, ["{}", '{"a": [1]}']),
        ({"choice": ["yes", "no"]}, ["yes", "no"]),
        ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"a","age":1}']),
    ],
)
def test_other_forms_leave_room_for_calls(backend, form, texts):
    if backend == "xgrammar" and "disable_any_whitespace" in form:
        backend = "auto"
    accepts = compiled(either(StructuredOutputs(**form)), backend)
    assert all(map(accepts, texts))
    assert accepts('<tool_call>\n{"name": "weather", "arguments": {"city":"a"}}\n</tool_call>')
    assert not accepts("perhaps")


@pytest.mark.parametrize("form", [{"regex": "a+"}, {"json": {}, "whitespace_pattern": " "}])
def test_forms_of_other_kinds_exclude_calls(form):
    stated = StructuredOutputs(**form)
    assert either(stated) is stated


def test_tools_of_other_kinds_are_left_out():
    stated, search = StructuredOutputs(json=PERSON), {"type": "web_search"}
    assert either(stated, tools=[search]) is stated
    outputs = either(stated, tools=[search, TOOLS[1]])
    assert outputs.parts[1].field == "tools[1].function.parameters"


def test_a_form_excludes_calls_whose_syntax_is_not_known():
    stated = StructuredOutputs(json=PERSON)
    assert form_or_calls(stated, TOOLS, None, parallel_tool_calls=True) is stated
    assert strict_calls([tool("weather", WEATHER, strict=True)], None) is None


@each_backend
@pytest.mark.parametrize("parser", WITH_JSON)
def test_calls_of_strict_tools_obey_their_schemas_anywhere_in_a_text(backend, parser):
    tools = [tool("weather", WEATHER, strict=True), tool("add", ADD)]
    accepts = compiled(strict_calls(tools, tool_parser(parser).syntax), backend)
    for text in (*CALLS[parser], "Let me see. ", ""):
        assert accepts(text)
        assert accepts(f"Let me see. {text}")
    wrong = CALLS[parser][0].replace('"Oslo"', "7")
    assert not accepts(wrong)
    assert not accepts(f"Let me see. {wrong}")


def test_without_strict_tools_no_text_is_constrained():
    for parser in CALLS:
        assert strict_calls(TOOLS, tool_parser(parser).syntax) is None


def test_a_strict_tool_that_is_not_enforced_is_refused_by_its_field():
    tools = [tool("weather", WEATHER), tool("add", ADD, strict=True)]
    message = r"^tools\[5\].parameters is not supported: uniqueItems at #/properties/tags"
    fields = ["tools[4].parameters", "tools[5].parameters"]
    for outputs in (
        strict_calls(tools, tool_parser("hermes").syntax, fields),
        either(StructuredOutputs(json=PERSON), tools=tools, schema_fields=fields),
        either(StructuredOutputs(json=PERSON), "json", tools=tools, schema_fields=fields),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            compiled(outputs, "auto")


def test_a_tag_has_each_schema_once():
    large = {"type": "object", "properties": {f"p{i}": TEXT for i in range(400)}}
    outputs = either(StructuredOutputs(json=PERSON), tools=[tool("large", large)])
    assert len(outputs.structural_tag) < 1.2 * len(json.dumps(large))


@pytest.mark.parametrize("parser", WITH_JSON)
def test_hints_that_are_too_large_for_a_form_are_left_out(parser):
    syntax, large = tool_parser(parser).syntax, {**WEATHER, "description": "d" * 5000}
    tools = [tool(f"f{i}", large) for i in range(40)]
    form = StructuredOutputs(json_object=True)
    for strict in ([], [tool("strict", ADD, strict=True)]):
        outputs = form_or_calls(form, tools + strict, syntax, parallel_tool_calls=True)
        assert '"description"' not in outputs.structural_tag
        assert ("uniqueItems" in outputs.structural_tag) == bool(strict)
    assert "uniqueItems" in strict_calls(tools + strict, syntax).structural_tag


@pytest.mark.parametrize("parser", WITH_JSON)
def test_strict_tools_that_are_too_large_for_a_form_are_refused(parser):
    syntax, large = tool_parser(parser).syntax, {**WEATHER, "description": "d" * 5000}
    tools = [tool(f"f{i}", large, strict=True) for i in range(60)]
    form = StructuredOutputs(json_object=True)
    with pytest.raises(InvalidArgumentError, match=r"^tools has \d+ bytes"):
        strict_calls(tools, syntax)
    with pytest.raises(InvalidArgumentError, match=r"^tools has \d+ bytes"):
        form_or_calls(form, tools, syntax, parallel_tool_calls=True)
