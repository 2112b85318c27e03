"""`StructuredOutputs` refuses what has no meaning, and has one key per content."""

import json

import pytest

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import MAX_JSON_DEPTH
from baton.common.request.structured_outputs import (
    MAX_CHOICES,
    MAX_REGEX_BYTES,
    MAX_SOURCE_BYTES,
    StructuredOutputs,
)

FORMS = {
    "json": '{"type":"integer"}',
    "json_object": True,
    "regex": "a+",
    "choice": ["a", "b"],
    "grammar": 'root ::= "a"',
    "structural_tag": '{"format":{"type":"any_text"}}',
}


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("form", FORMS)
def test_each_form_alone_is_accepted(form):
    outputs = StructuredOutputs(**{form: FORMS[form]})
    assert outputs.form == form
    assert outputs == StructuredOutputs(**{form: FORMS[form]})
    assert hash(outputs) == hash(StructuredOutputs(**{form: FORMS[form]}))


def test_no_form_and_two_forms_are_refused():
    with pytest.raises(InvalidArgumentError, match="sets no form; set exactly one of json, "):
        StructuredOutputs()
    with pytest.raises(InvalidArgumentError, match="sets json, regex; set exactly one"):
        StructuredOutputs(json={}, regex="a")
    with pytest.raises(InvalidArgumentError, match="sets no form"):
        StructuredOutputs(json_object=False)


def test_a_schema_is_kept_as_compact_text_with_its_order():
    outputs = StructuredOutputs(json={"b": 1, "a": "ü"})
    assert outputs.json == '{"b":1,"a":"ü"}'
    assert StructuredOutputs(json=' { "b": 1, "a": "\\u00fc" }') == outputs
    assert StructuredOutputs(json=json.loads(outputs.json)).key == outputs.key


def test_keys_differ_with_the_content():
    contents = [
        {"json": '{"a":1,"b":2}'},
        {"json": '{"b":2,"a":1}'},
        {"json": '{"a":1,"b":2}', "disable_any_whitespace": True},
        {"json": '{"a":1,"b":2}', "whitespace_pattern": " "},
        {"regex": "ab"},
        {"grammar": "ab"},
        {"choice": ["ab"]},
        {"choice": ["a", "b"]},
    ]
    assert len({StructuredOutputs(**content).key for content in contents}) == len(contents)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": "{"}, "json is not JSON: Expecting property name"),
        ({"json": '{"a": NaN}'}, "json is not JSON: NaN is not a JSON value"),
        ({"json": '{"a": 1e999}'}, "json is not JSON: Out of range float values"),
        ({"json": {"a": {1: 2}}}, "json has the key 1; keys must be texts"),
        ({"json": {"a": {1, 2}}}, "json is not JSON: .*set"),
        ({"json": "[]"}, "json is .+; it must be a JSON object"),
        ({"json": "["}, "json is not JSON"),
        ({"json": "[" * 100_000}, "json is not JSON: maximum recursion"),
        ({"json": nested(MAX_JSON_DEPTH + 1)}, "json nests more than 64 levels deep"),
        ({"json": '{"a":"\\ud800"}'}, "json is not valid Unicode: lone surrogate"),
        ({"json": '{"a":"' + "x" * MAX_SOURCE_BYTES + '"}'}, "json has 262152 bytes"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": "a\0"}, "regex contains a NUL"),
        ({"regex": 3}, "regex is .+; it must be a text"),
        ({"regex": "é" * MAX_REGEX_BYTES}, "regex has 32768 bytes of UTF-8; at most 16384"),
        ({"grammar": ""}, "grammar is empty"),
        ({"grammar": "a" * (MAX_SOURCE_BYTES + 1)}, "grammar has 262145 bytes"),
        ({"choice": []}, "choice has 0 entries; it must have 1 to 4096"),
        ({"choice": ["a", ""]}, "choice is empty"),
        ({"choice": "ab"}, "choice is 'ab'; it must be an array"),
        ({"choice": [1]}, "choice is .+; it must be a text"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice has 4097 entries"),
        ({"choice": ["a" * 200_000, "b" * 200_000]}, "choice has 400000 bytes"),
        ({"structural_tag": "x"}, "structural_tag is not JSON"),
        ({"structural_tag": "3"}, "structural_tag is .+; it must be a JSON object"),
        (
            {"json": {}, "disable_any_whitespace": "no"},
            "disable_any_whitespace is 'no'; it must be",
        ),
        ({"json_object": 1}, "json_object is 1; it must be true"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern has no meaning for regex"),
        ({"json": {}, "whitespace_pattern": " " * 257}, "whitespace_pattern has 257 bytes"),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern is set with disable_any_whitespace",
        ),
    ],
)
def test_malformed_constraints_are_refused_by_name(fields, message):
    with pytest.raises(InvalidArgumentError, match=rf"^structured_outputs\.{message}"):
        StructuredOutputs(**fields)


def test_choices_are_distinct_and_in_order():
    assert StructuredOutputs(choice=["b", "a", "b"]).choice == ("b", "a")


def test_a_schema_of_the_greatest_depth_is_accepted():
    assert StructuredOutputs(json=nested(MAX_JSON_DEPTH - 1)).form == "json"


def test_the_fields_of_a_form_are_those_that_the_client_sent():
    def field_of(*names):
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return StructuredOutputs.of_tools(tools, "required").client_field

    assert StructuredOutputs(regex="a").client_field == "structured_outputs.regex"
    assert field_of("a") == "tools[0].function.parameters"
    assert field_of(*"abcde").endswith(", tools[2].function.parameters and 2 more")
