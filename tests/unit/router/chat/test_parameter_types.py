"""Types of parameters that models write as text: what their schemas accept."""

import json

import pytest

from router.chat.tool_parsers import tool_parser
from router.chat.tool_parsers.parameter_schemas import FunctionSchema
from tests.support.chat_parsers import answer_of, check_cuts, num_calls_of, output_of

DEFS = {
    "Year": {"type": "string", "enum": ["2024", "2025"]},
    "Count": {"type": "integer", "minimum": 0},
    "Point": {"type": "object", "properties": {"x": {"type": "number"}}},
    "Alias": {"$ref": "#/$defs/Count"},
    "a/b~c": {"type": "boolean"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Tree": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}]},
}
YEAR = {"$ref": "#/$defs/Year"}


def call_text(value, key="a"):
    return (
        f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


def parser_of(parameters):
    function = {"name": "f", "parameters": parameters}
    return lambda: tool_parser("qwen3_coder")(({"type": "function", "function": function},))


def check(parameters, value, expected):
    make = output_of(parser_of(parameters))
    check_cuts(make, call_text(value), (None, None, [("f", f'{{"a": {expected}}}')]))


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        # References, and what combines schemas.
        (YEAR, "2024", '"2024"'),
        (YEAR, " 2024 ", '"2024"'),
        (YEAR, '"2024"', '"2024"'),
        (YEAR, "1999", '"1999"'),
        ({"$ref": "#/definitions/Year"}, "2024", '"2024"'),
        ({"allOf": [YEAR]}, "2024", '"2024"'),
        ({"allOf": [YEAR, {"description": "y"}], "title": "Y"}, "2024", '"2024"'),
        ({"anyOf": [YEAR, {"type": "null"}]}, "2024", '"2024"'),
        ({"anyOf": [YEAR, {"type": "null"}]}, "None", "null"),
        ({"oneOf": [YEAR, {"type": "integer"}]}, "2024", "2024"),
        ({"oneOf": [YEAR, {"type": "boolean"}]}, "2024", '"2024"'),
        ({"$ref": "#/$defs/Alias"}, "2024", "2024"),
        ({"$ref": "#/$defs/a~1b~0c"}, "True", "true"),
        ({"$ref": "#/$defs/a%2Fb~0c"}, "x", '"x"'),
        ({"$ref": "#/$defs/Point"}, "{'x': 1}", '{"x": 1}'),
        ({"$ref": "#/properties/b"}, "7", "7"),
        ({"$defs": {"Own": {"type": "string"}}, "$ref": "#/$defs/Own"}, "7", '"7"'),
        ({"$ref": "#/$defs/Tree"}, '["x", ["y"]]', '["x", ["y"]]'),
        ({"$ref": "#/$defs/Tree"}, "7", '"7"'),
        # Without an answer: any literal, or else text.
        ({"$ref": "#/$defs/None"}, '{"k": 1}', '{"k": 1}'),
        ({"$ref": "https://example.com/s"}, "x y", '"x y"'),
        ({"$ref": "#/$defs/Loop"}, "7", "7"),
        # Values.
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"enum": ["true", "no"]}, "true", '"true"'),
        ({"enum": ["null", "x"]}, "null", '"null"'),
        ({"enum": ["x", None]}, "null", "null"),
        ({"enum": [1.0, 2.5]}, "1", "1"),
        ({"enum": [1.0, 2.5]}, "2.5", "2.5"),
        ({"nullable": True}, "12", '"12"'),
        ({"enum": [True]}, "1", "1"),
        ({"const": "7"}, "7", '"7"'),
        ({"const": 7}, "7", "7"),
        ({"const": True}, "True", "true"),
        ({"type": "string", "const": "a"}, "a", '"a"'),
        ({"anyOf": [{"const": str(i)} for i in range(40)]}, "7", '"7"'),
        ({"anyOf": [{"const": "7"}, {"const": 8}, {"type": "null"}]}, "8", "8"),
        ({"anyOf": [{}, {"type": "null"}]}, "8", '"8"'),
        ({"allOf": [{"type": "string"}, {"enum": ["7", 8]}]}, "8", '"8"'),
        # Numbers.
        ({"type": "integer"}, "007", "7"),
        ({"type": "integer"}, "5.0", "5"),
        ({"type": "integer"}, "1e3", "1000"),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "12345678901234567890123", "12345678901234567890123"),
        ({"type": "integer"}, "1_000", "1000"),
        ({"type": "integer"}, "many", '"many"'),
        ({"type": "number"}, "007", "7"),
        ({"type": "number"}, " 1.50 ", "1.50"),
        ({"type": "number"}, "1e3", "1e3"),
        ({"type": "number"}, "-.5", "-0.5"),
        ({"type": "number"}, "3", "3"),
        ({"type": "number"}, "0.1000000000000000055511151", "0.1000000000000000055511151"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "1e999", '"1e999"'),
        ({"type": "number"}, "7" * 400, "7" * 400),  # more than a float can have
        ({"type": "integer"}, "-" + "7" * 400, "-" + "7" * 400),
        ({"type": "object"}, "7" * 400, "7" * 400),
        ({"minimum": 0}, "3", "3"),
        # Booleans, null, arrays and objects.
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "FALSE", "false"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": "integer"}, "null", "null"),
        ({"type": "null"}, "None", "null"),
        ({"type": "string", "nullable": True}, "null", "null"),
        ({"type": "object"}, '{"k": [1, "\\/"]}', '{"k": [1, "/"]}'),
        ({"type": "object"}, "{'k': (1, None)}", '{"k": [1, null]}'),
        ({"type": "object"}, '{"k": "x\ny"}', '{"k": "x\\ny"}'),
        ({"type": "array"}, "['x', True]", '["x", true]'),
        ({"type": "array"}, "[NaN]", '"[NaN]"'),
        ({"type": "array"}, "[1", '"[1"'),
        ({"type": "array"}, "x, y", '"x, y"'),
        ({"items": {"type": "integer"}}, "[1]", "[1]"),
        ({"properties": {"k": {}}}, '{"k": 1}', '{"k": 1}'),
        # Several types: text is what can be nothing else.
        ({"type": ["string", "integer"]}, "7", "7"),
        ({"type": ["string", "integer"]}, "007", '"007"'),
        ({"type": ["string", "number"]}, "+49 30", '"+49 30"'),
        ({"type": ["string", "number"]}, "+49", '"+49"'),
        ({"type": ["string", "integer"]}, '"7"', '"\\"7\\""'),
        ({"type": ["string", "integer"]}, "7.5", '"7.5"'),
        ({"type": ["string", "array"]}, '["x"]', '["x"]'),
        ({"type": ["string", "array"]}, "x", '"x"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["boolean", "string"]}, "true", "true"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x", '"x"'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", '"12"'),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, '{"k": 1}', '{"k": 1}'),
        # Text.
        ({"type": "string"}, "2024", '"2024"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, ' "x" ', '" \\"x\\" "'),
        ({"format": "date"}, "2024", '"2024"'),
        # Names of types that are not JSON Schema's.
        ({"type": "str"}, "7", '"7"'),
        ({"type": "Integer"}, "7", "7"),
        ({"type": "float"}, "7", "7"),
        ({"type": "bool"}, "True", "true"),
        ({"type": "dict"}, "{'k': 1}", '{"k": 1}'),
        ({"type": "any"}, "7", "7"),
        # Enums of many values.
        ({"enum": [*map(str, range(5000))]}, "7", '"7"'),
        ({"enum": [*range(5000), None]}, "7", "7"),
        ({"enum": [*range(5000), None]}, "x", '"x"'),
        # Nothing is stated, or what is stated is no schema.
        ({}, "12", '"12"'),
        ({"description": "d"}, "12", '"12"'),
        (True, "12", '"12"'),
        (None, "12", '"12"'),
        ({"type": None, "enum": None, "anyOf": None}, "12", '"12"'),
    ],
)
def test_a_value_is_what_its_schema_accepts(schema, value, expected):
    properties = {"a": schema, "b": {"type": "integer"}}
    check({"properties": properties, "$defs": DEFS, "definitions": DEFS}, value, expected)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"properties": {}, "additionalProperties": {"type": "integer"}}, "7"),
        ({"properties": {"b": {}}, "additionalProperties": True}, '"7"'),
        ({"patternProperties": {"^a": {"type": "integer"}}}, "7"),
        ({"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"a": {"type": "integer"}}}}}, "7"),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}}]}, "7"),
        ({"anyOf": [{"properties": {"a": {"type": "integer"}}}, {}]}, "7"),
        ({"properties": None}, '"7"'),
        ({"$ref": "#"}, '"7"'),
        ({"properties": {"a": {"$ref": f"#/anyOf/{'1' * 5000}"}}, "anyOf": [{}]}, "7"),
        ({}, '"7"'),
        (None, '"7"'),
    ],
)
def test_schemas_of_parameters_are_found_wherever_they_are(parameters, expected):
    check(parameters, "7", expected)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # The next parameter's tag ends a value, if it is one of the function's.
        ("<function=f><parameter=a>1<parameter=b>2</function></tool_call>", '{"a": 1, "b": "2"}'),
        ("<function=f><parameter=a>1\n<parameter=b>2\n</function>", '{"a": 1, "b": "2"}'),
        (
            "<function=f><parameter=b><parameter=c>1</parameter></function>",
            '{"b": "<parameter=c>1"}',
        ),
        (
            "<function=f><parameter=b>x<parameter=b>y</parameter></function>",
            '{"b": "x<parameter=b>y"}',
        ),
        ("<function=f><parameter=a>1</function>", '{"a": 1}'),
    ],
)
def test_values_without_an_end_tag(text, calls):
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}}
    make = output_of(parser_of({"properties": properties}))
    for start in ("<tool_call>", ""):
        check_cuts(make, start + text, (None, None, [("f", calls)]))


@pytest.mark.parametrize(
    "text",
    [
        "Use <function=g><parameter=a>1</parameter></function> for it.",
        "Use <function=f> for it.",
        "A <function=f",
        "A <function=f>\n",
    ],
)
def test_text_that_mentions_a_function_is_content(text):
    check_cuts(output_of(parser_of({})), text, (text, None, []))


@pytest.mark.parametrize("schema", [{"type": "array"}, {"enum": [1]}, {"type": "integer"}])
def test_deep_values_are_json(schema):
    for depth in (100, 900, 1000, 100_000):
        parser = parser_of({"properties": {"a": schema}})
        answer = answer_of(output_of(parser), [call_text("[" * depth + "]" * depth)])
        assert answer[2][0][1].startswith('{"a": ')


def wide(depth):
    return {"anyOf": [{"$ref": f"#/$defs/{depth + 1}"}] * 1000} if depth < 60 else {}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": wide(0)}, "$defs": {str(i): wide(i) for i in range(1, 61)}},
        {"properties": {"a": {"allOf": [{"enum": list(range(5000))}] * 500}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"properties": {"a": {"anyOf": [{"allOf": [{"$ref": "#/properties/a"}] * 50}] * 50}}},
        {"anyOf": [{"$ref": "#"}] * 1000},
        {"properties": {"a": {"allOf": [{"anyOf": [{"const": i} for i in range(900)]}] * 300}}},
        {"properties": {"a": {"enum": list(range(50_000))}}},
        {"patternProperties": {f"^{i}": {"type": "integer"} for i in range(50_000)}},
    ],
    ids=["wide", "long", "cycle", "bushy", "root", "values", "enum", "patterns"],
)
def test_schemas_cost_little_whatever_they_refer_to(parameters):
    schema = FunctionSchema(parser_of(parameters)().tools, "f")
    assert num_calls_of(schema.accepted, "a") < 100_000
    assert num_calls_of(schema.may_have, "a") < 20_000
    answer = answer_of(output_of(parser_of(parameters)), [call_text("7")])
    assert json.loads(answer[2][0][1])["a"] in (7, "7")
