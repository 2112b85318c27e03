"""OpenAI's `response_format` and tools become `StructuredOutputs`, or are refused by name."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import InvalidArgumentError
from baton.common.request.schema_parts import SchemaPart
from baton.common.request.structured_outputs import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def json_schema(**changes):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA} | changes}


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputs(json_object=True)),
        (json_schema(), StructuredOutputs(json=SCHEMA)),
        (json_schema(strict=True, description="d"), StructuredOutputs(json=SCHEMA)),
        (json_schema(strict=None), StructuredOutputs(json=SCHEMA)),
        (TAG, StructuredOutputs(structural_tag=TAG)),
        (
            {"type": "structural_tag", "structures": [], "triggers": []},
            StructuredOutputs(
                structural_tag={"type": "structural_tag", "structures": [], "triggers": []}
            ),
        ),
    ],
)
def test_each_type_of_response_format_is_a_form(response_format, expected):
    assert StructuredOutputs.of_response_format(response_format) == expected


def nested(depth):
    return {"items": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        (None, "response_format is missing; it must be a JSON object"),
        ("json_object", "response_format is .+; it must be a JSON object"),
        ({}, "response_format.type is None; it must be one of text, json_object, json_schema, s"),
        ({"type": "xml"}, "response_format.type is 'xml'"),
        ({"type": ["text"]}, r"response_format.type is \['text'\]"),
        ({"type": "text", "schema": {}}, "response_format.schema is unknown; it has type"),
        (
            {"type": "json_schema"},
            "response_format.json_schema is missing; it must be a JSON object",
        ),
        (json_schema(schema=None), "response_format.json_schema.schema is missing; it must be a"),
        (json_schema(schema=[1]), r"response_format.json_schema.schema is \[1\]; it must be a"),
        (json_schema(schema=nested(65)), "response_format.json_schema.schema nests more than 64"),
        (json_schema(schema={"const": "x" * 2**18}), "response_format.json_schema.schema has 26"),
        (json_schema(strict="yes"), "response_format.json_schema.strict is 'yes'; it must be true"),
        (json_schema(name=3), "response_format.json_schema.name is 3; it must be a text"),
        (json_schema(regex="a"), "response_format.json_schema.regex is unknown; it has name, desc"),
    ],
)
def test_malformed_response_formats_are_refused_by_name(response_format, message):
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        StructuredOutputs.of_response_format(response_format)


def tool(name="add", **function):
    return {"type": "function", "function": {"name": name, **function}}


def named(name):
    return {"type": "function", "function": {"name": name}}


NUMBER = {"$ref": "#/$defs/Number"}
ADD = tool(
    parameters={
        "type": "object",
        "properties": {"left": NUMBER},
        "required": ["left"],
        "$defs": {"Number": {"type": "number"}},
    },
    description="adds",
    strict=True,
)
STOP = tool("stop")


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_no_form_is_needed_unless_a_call_is_forced(choice):
    assert StructuredOutputs.of_tools([ADD], choice) is None
    assert StructuredOutputs.of_tools(None, choice) is None


def form_of_call(schema):
    """Without optional whitespace."""
    return StructuredOutputs(json=schema, disable_any_whitespace=True)


def test_a_named_function_has_the_form_of_its_parameters():
    outputs = StructuredOutputs.of_tools([STOP, ADD], named("add"))
    assert outputs == form_of_call(ADD["function"]["parameters"])
    outputs = StructuredOutputs.of_tools([STOP, ADD], named("stop"))
    assert outputs == form_of_call({"type": "object", "properties": {}})


@pytest.mark.parametrize(
    ("calls", "is_valid"),
    [
        ([{"name": "add", "parameters": {"left": 1.5}}], True),
        ([{"name": "stop", "parameters": {}}, {"name": "add", "parameters": {"left": 1}}], True),
        ([], False),
        ([{"name": "add", "parameters": {"left": "1"}}], False),
        ([{"name": "add", "parameters": {}}], False),
        ([{"name": "sub", "parameters": {}}], False),
        ([{"name": "stop"}], False),
        ({"name": "stop", "parameters": {}}, False),
    ],
)
def test_required_is_an_array_of_calls(calls, is_valid):
    tools = [ADD, STOP, tool("sum", parameters=ADD["function"]["parameters"])]
    before = json.dumps(tools)
    schema = json.loads(StructuredOutputs.of_tools(tools, "required").json)
    assert jsonschema.Draft202012Validator(schema).is_valid(calls) == is_valid
    assert json.dumps(tools) == before


def test_calls_that_may_not_be_parallel_are_an_array_of_one():
    outputs = StructuredOutputs.of_tools([STOP], "required", False)
    assert outputs.disable_any_whitespace
    schema = json.loads(outputs.json)
    call = {"name": "stop", "parameters": {}}
    assert jsonschema.Draft202012Validator(schema).is_valid([call])
    assert not jsonschema.Draft202012Validator(schema).is_valid([call, call])


OTHER = {
    "type": "object",
    "properties": {"text": NUMBER, "same": {"$ref": "#/properties/text"}},
    "required": ["text"],
    "$defs": {"Number": {"type": "string"}},
}
RECURSIVE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["n"]}
IDENTIFIED = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "https://example.com/a.json",
    "properties": {
        "a": {"$ref": "https://example.com/a.json#/definitions/Number"},
        "b": {"$ref": "#/definitions/Number"},
    },
    "definitions": {"Number": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("name", "parameters", "is_valid"),
    [
        ("add", {"left": 1}, True),
        ("add", {"left": "1"}, False),
        ("other", {"text": "1", "same": "2"}, True),
        ("other", {"text": 1}, False),
        ("other", {"text": "1", "same": 2}, False),
        ("recursive", {"n": 1, "next": {"n": 1}}, True),
        ("recursive", {"n": 1, "next": {}}, False),
        ("identified", {"a": 1, "b": 2}, True),
        ("identified", {"a": "1"}, False),
        ("identified", {"b": "1"}, False),
    ],
)
def test_the_references_of_each_tool_point_into_its_own_schema(name, parameters, is_valid):
    tools = [
        ADD,
        tool("other", parameters=OTHER),
        tool("recursive", parameters=RECURSIVE),
        tool("identified", parameters=IDENTIFIED),
    ]
    schema = json.loads(StructuredOutputs.of_tools(tools, "required").json)
    calls = [{"name": name, "parameters": parameters}]
    assert jsonschema.Draft202012Validator(schema).is_valid(calls) == is_valid
    schema = json.loads(StructuredOutputs.of_tools(tools, named(name)).json)
    assert jsonschema.Draft202012Validator(schema).is_valid(parameters) == is_valid


def test_keys_that_say_nothing_of_calls_are_ignored():
    marked = tool(parameters=ADD["function"]["parameters"], input_examples=[], arguments={})
    outputs = StructuredOutputs.of_tools([{**marked, "cache_control": {}}], named("add"))
    assert outputs == form_of_call(ADD["function"]["parameters"])


def test_a_form_says_whose_schemas_it_has():
    lax = tool("lax", parameters=OTHER)
    outputs = StructuredOutputs.of_tools([ADD, lax], "required")
    assert outputs.parts == (
        SchemaPart(pointer="/$defs/0", field="tools[0].function.parameters"),
        SchemaPart(pointer="/$defs/1", field="tools[1].function.parameters", is_hint=True),
    )
    outputs = StructuredOutputs.of_tools([lax], named("lax"), schema_fields=["tools[7].schema"])
    assert outputs.parts == (SchemaPart(pointer="", field="tools[7].schema", is_hint=True),)


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (None, "required", "tools is missing; it must be an array"),
        ([], "required", "tools is empty; tool_choice forces a call"),
        ("add", "required", "tools is .+; it must be an array"),
        ([ADD, 3], "required", r"tools\[1\] is .+; it must be a JSON object"),
        ([{"type": "web"}], "required", r"tools\[0\].type is 'web'; it must be 'function'"),
        ([{"type": "function"}], "required", r"tools\[0\].function is missing; it must be a JSON"),
        ([tool("")], "required", r"tools\[0\].function.name is ''; it must be a text that is not"),
        ([ADD, tool(None)], "required", r"tools\[1\].function.name is None"),
        ([ADD, ADD], "required", r"tools\[1\].function.name is 'add', the name of an earlier"),
        (
            [tool(parameters=[1])],
            "required",
            r"tools\[0\].function.parameters is \[1\]; it must be",
        ),
        ([tool(strict="yes")], "required", r"tools\[0\].function.strict is 'yes'; it must be true"),
        ([ADD], "any", "tool_choice is 'any'; it must be none, auto, required, or an object"),
        ([ADD], {"type": "allowed_tools"}, "tool_choice.type is 'allowed_tools'"),
        ([ADD], {"type": "function"}, "tool_choice.function is missing; it must be a"),
        ([ADD], named(""), "tool_choice.function.name is ''"),
        ([ADD, STOP], named("sub"), "tool_choice.function.name is 'sub'; .* tools: add, stop$"),
    ],
)
def test_malformed_tools_are_refused_by_name(tools, choice, message):
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        StructuredOutputs.of_tools(tools, choice)


NAMES = [
    "type",
    "function",
    "name",
    "parameters",
    "json_schema",
    "schema",
    "strict",
    "$defs",
    "$ref",
]
VALUES = [
    "text",
    "json_object",
    "json_schema",
    "structural_tag",
    "function",
    "add",
    "#",
    "required",
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(VALUES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(ANYTHING, ANYTHING, ANYTHING)
def test_anything_is_a_form_or_refused(response_format, tools, tool_choice):
    for make, arguments in (
        (StructuredOutputs.of_response_format, [response_format]),
        (StructuredOutputs.of_tools, [tools, tool_choice]),
        (StructuredOutputs.of_tools, [[{"type": "function", "function": tools}], "required"]),
        (StructuredOutputs.of_tools, [[tool(parameters=tools), ADD], "required"]),
    ):
        message = ""
        try:
            make(*arguments)
        except InvalidArgumentError as error:
            message = error.message
        assert not message or message.startswith(("response_format", "tool"))


def test_errors_show_values_of_any_size_and_depth():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10**6):
        with pytest.raises(InvalidArgumentError) as error:
            StructuredOutputs.of_response_format({"type": value})
        assert len(error.value.message) < 300
