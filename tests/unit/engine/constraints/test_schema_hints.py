"""The schemas of tools: a hint is enforced as far as a backend can; a strict one is refused."""

import json

import jsonschema
import pytest

from baton.common.errors import InvalidArgumentError
from baton.common.request.schema_parts import SchemaPart
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.backends import compile_with
from engine.constraints.hints import (
    ANY_OBJECT,
    change_hints,
    relax_schema,
    repair_schema,
    schemas_of_parts,
)
from engine.constraints.matcher import Constraint
from engine.constraints.schema import check_schema
from tests.support.constraints import BACKENDS, backend_of, vocabulary_of

KIND = "byte_level"
TEXT = {"type": "string"}
NUMBER = {"type": "integer"}


def object_of(required=("b",), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


def nodes(**changes):
    """A schema of lists, with references."""
    node = object_of((), next={"$ref": "#/definitions/Node"}, tags={"type": "array", **changes})
    return object_of((), a={"$ref": "#/definitions/Node"}) | {"definitions": {"Node": node}}


# Schemas that no backend enforces as a whole, and what is left of each.
HINTS = {
    "uniqueItems": (
        object_of(a={"type": "array", "items": TEXT, "uniqueItems": True}, b=NUMBER),
        object_of(a={"type": "array", "items": TEXT}, b=NUMBER),
    ),
    "not": (object_of(a={"not": TEXT}, b=NUMBER), object_of(a={}, b=NUMBER)),
    "if": (object_of(b=NUMBER) | {"if": {}, "then": {}, "else": {}}, object_of(b=NUMBER)),
    "contains": (
        object_of(a={"type": "array", "contains": TEXT, "minContains": 2}, b=NUMBER),
        object_of(a={"type": "array"}, b=NUMBER),
    ),
    "lookahead": (
        object_of(a={"type": "string", "pattern": "^(?=a).*$"}, b=NUMBER),
        object_of(a=TEXT, b=NUMBER),
    ),
    "a broken pattern": (
        object_of(a={"type": "string", "pattern": "("}, b=NUMBER),
        object_of(a=TEXT, b=NUMBER),
    ),
    "dependentRequired": (
        object_of(b=NUMBER) | {"dependentRequired": {"a": ["b"]}},
        object_of(b=NUMBER),
    ),
    "properties that are null": ({"type": "object", "properties": None}, {"type": "object"}),
    "a schema that is null": (object_of((), a=NUMBER, b=None), {"type": "object", "required": []}),
    "an unknown type": (object_of(a={"type": "any"}, b=NUMBER), object_of(a={}, b=NUMBER)),
    "negative sizes": (
        object_of(a={"type": "array", "minItems": -1}, b={"type": "integer", "minimum": 10**20}),
        object_of(a={"type": "array"}, b=NUMBER),
    ),
    "no values": (object_of(a={"enum": []}, b=NUMBER), object_of(a={}, b=NUMBER)),
    "a lost reference": (
        object_of(a={"$ref": "#/$defs/None"}, b={"$ref": "#/properties/c"}, c=NUMBER),
        object_of(a={}, b={"$ref": "#/properties/c"}, c=NUMBER),
    ),
    "a remote reference": (
        object_of(a={"$ref": "https://example.com/a.json"}, b=NUMBER),
        object_of(a={}, b=NUMBER),
    ),
    "alternatives that overlap": (
        object_of(b={"oneOf": [object_of((), x=TEXT), object_of((), y=TEXT)]}),
        object_of(b={"anyOf": [object_of((), x=TEXT), object_of((), y=TEXT)]}),
    ),
    "a definition": (nodes(uniqueItems=True), nodes()),
    "an endless schema": (object_of(("n",), n={"$ref": "#"}), ANY_OBJECT),
    "a circle": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ANY_OBJECT),
}
each_backend = pytest.mark.parametrize("name", BACKENDS)


@each_backend
@pytest.mark.parametrize("hint", HINTS)
def test_a_hint_loses_only_what_is_not_enforced(name, hint):
    schema, expected = HINTS[hint]
    backend = backend_of(name, KIND)
    relaxed = relax_schema(repair_schema(schema), backend.check)
    assert relaxed == expected
    backend.check(relaxed)


@pytest.mark.parametrize("hint", HINTS)
def test_a_sound_hint_that_a_backend_enforces_is_kept(hint):
    _, schema = HINTS[hint]
    assert relax_schema(repair_schema(schema), backend_of("llguidance", KIND).check) == schema


def test_a_reference_may_have_an_escape():
    definitions = {"$defs": {"B C": NUMBER}}
    schema = object_of(a={"not": {}}, b={"$ref": "#/$defs/B%20C"}) | definitions
    relaxed = relax_schema(repair_schema(schema), backend_of("llguidance", KIND).check)
    assert relaxed == object_of(a={}, b={"$ref": "#/$defs/B%20C"}) | definitions


def tool(name, parameters, **function):
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, **function},
    }


def compile_tools(choice, *tools, tool_choice="required"):
    """Compiles the form of forced calls, as the compile process does."""
    outputs = change_hints(StructuredOutputs.of_tools(tools, tool_choice), repair_schema)
    for part, schema in schemas_of_parts(outputs):
        check_schema(schema, part.field)
    backends = {name: backend_of(name, KIND) for name in BACKENDS}
    compiled = compile_with(backends, choice, outputs)
    grammar = backends[compiled.backend].load(compiled.data)
    return Constraint(grammar, vocabulary_of(KIND), "f").new_matcher(())


def accepts(matcher, text):
    tokens = vocabulary_of(KIND).byte_tokens
    return matcher.replay(tokens[byte] for byte in text.encode()) and matcher.may_stop


def call_of(name, **parameters):
    return json.dumps([{"name": name, "parameters": parameters}], separators=(",", ":"))


FINE = object_of(("q",), q=NUMBER)


@pytest.mark.parametrize("choice", ["auto", *BACKENDS])
@pytest.mark.parametrize(
    "hint", ["uniqueItems", "lookahead", "properties that are null", "a circle"]
)
def test_one_tool_that_is_not_enforced_leaves_the_others_as_they_are(choice, hint):
    tools = [tool("fine", FINE), tool("odd", HINTS[hint][0])]
    for text, is_accepted in (
        (call_of("fine", q=1), True),
        (call_of("fine", q="1"), False),
        (call_of("odd", b=1), True),
        (call_of("other"), False),
    ):
        assert accepts(compile_tools(choice, *tools), text) == is_accepted


@pytest.mark.parametrize("choice", ["auto", *BACKENDS])
def test_a_strict_tool_that_is_not_enforced_is_refused_by_name(choice):
    strict = tool("odd", HINTS["uniqueItems"][0], strict=True)
    for tool_choice in "required", {"type": "function", "function": {"name": "odd"}}:
        with pytest.raises(InvalidArgumentError) as error:
            compile_tools(choice, tool("fine", FINE), strict, tool_choice=tool_choice)
        message = error.value.message
        assert message.startswith("tools[1].function.parameters is not supported: ")
        assert "uniqueItems" in message


def test_a_strict_tool_that_is_malformed_is_refused_by_name():
    strict = tool("odd", object_of(b={"type": "array", "minItems": -1}), strict=True)
    message = (
        r"^tools\[1\].function.parameters is not supported: minItems is -1 at #/properties/b; "
        "it must be an integer >= 0$"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        compile_tools("auto", tool("fine", FINE), strict)


def test_a_strict_tool_beside_a_hint_is_enforced():
    strict = tool("strict", object_of(b={"type": "string", "maxLength": 3}), strict=True)
    tools = [tool("odd", HINTS["not"][0]), strict]
    assert accepts(compile_tools("auto", *tools), call_of("strict", b="abc"))
    assert not accepts(compile_tools("auto", *tools), call_of("strict", b="abcd"))


def test_parts_must_be_within_the_form():
    part = SchemaPart(pointer="/items", field="f")
    with pytest.raises(InvalidArgumentError, match=r"structured_outputs.parts has '/items'; it mu"):
        StructuredOutputs(json={"type": "array"}, parts=[part])
    with pytest.raises(InvalidArgumentError, match=r"structured_outputs.parts has no meaning for"):
        StructuredOutputs(regex="a", parts=[part])
    with pytest.raises(InvalidArgumentError, match="structured_outputs has no field 'parts'"):
        StructuredOutputs.of({"json": {}, "parts": []})


# Schemas with the values that other tools write into them, and what a backend must say.
VERDICTS = [
    *(({"type": "string", "format": name}, "") for name in ("path", "binary", "byte", "int32")),
    *(({"type": "string", "format": name}, "") for name in ("uri-reference", "idn-email", "regex")),
    *(({"type": "string", "format": name}, "") for name in ("date", "uuid", "uri", "ipv4")),
    ({"type": "integer", "format": "int64"}, ""),
    ({"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}, ""),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "title": "t", "type": "object"}, ""),
    ({"type": "string", "default": None, "examples": [1], "deprecated": True}, ""),
    ({"type": "string", "nullable": True, "$comment": "c", "readOnly": True, "xml": {}}, ""),
    ({"type": "object", "discriminator": {"propertyName": "a"}, "x-order": 1}, ""),
    ({"type": "object", "cache_control": {"type": "ephemeral"}}, ""),
    ({"type": "object", "properties": {"a": True, "b": {}}}, ""),
    ({"type": "object", "properties": {"format": TEXT, "title": NUMBER}, "required": ["c"]}, ""),
    ({"type": ["string", "null"]}, ""),
    ({"const": None}, ""),
    ({"enum": [None, 1, "a"]}, ""),
    ({"type": "array", "uniqueItems": False}, ""),
    ({"type": "array", "items": TEXT, "minItems": 1.0}, ""),
    ({"type": "string", "pattern": "^[a-z]+$"}, ""),
    ({"type": "array", "minItems": -1}, "minItems is -1 at #; it must be an integer >= 0"),
    ({"type": "array", "maxItems": "1"}, "maxItems is '1' at #; it must be an integer >= 0"),
    ({"type": "array", "minItems": True}, "minItems is True at #; it must be an integer >= 0"),
    ({"type": "string", "minLength": 1.5}, "minLength is 1.5 at #; it must be an integer >= 0"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength is 5 at #; it must be at most"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems is 2 at #; it must be at most"),
    (
        {"properties": {"a": {"minProperties": -1}}},
        "minProperties is -1 at #/properties/a; it must",
    ),
    ({"type": "String"}, "type is 'String' at #; it must be one of null, boolean"),
    ({"type": ["string", "file"]}, r"type is \['string', 'file'\] at #"),
    ({"properties": None}, "properties is None at #; it must be an object of schemas"),
    ({"properties": {"a": 3}}, "properties is {'a': 3} at #; it must be an object of schemas"),
    ({"required": "a"}, "required is 'a' at #; it must be a list of texts"),
    ({"items": None}, "items is None at #; it must be a schema or a list"),
    ({"anyOf": []}, "an empty anyOf at #"),
    ({"anyOf": {"type": "null"}}, "anyOf is {'type': 'null'} at #; it must be a list of schemas"),
    ({"enum": []}, "an empty enum at #"),
    ({"enum": None}, "enum is None at #; it must be a list"),
    ({"type": "string", "pattern": 5}, "pattern is 5 at #; it must be a text"),
    ({"type": "string", "format": 5}, "format is 5 at #; it must be a text"),
    ({"type": "number", "multipleOf": 0}, "multipleOf is 0 at #; it must be a number > 0"),
    ({"type": "number", "minimum": "5"}, "minimum is '5' at #; it must be a number"),
    ({"uniqueItems": 1}, "uniqueItems is 1 at #; it must be true or false"),
    ({"additionalProperties": None}, "additionalProperties is None at #; it must be a schema"),
    ({"$ref": 5}, r"\$ref is 5 at #; it must be a text"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "it must be that of draft 4 or later"),
]


@pytest.mark.parametrize(("schema", "problem"), VERDICTS)
def test_annotations_are_ignored_and_malformed_keywords_are_refused_by_name(schema, problem):
    backends = {name: backend_of(name, KIND) for name in BACKENDS}
    if problem:
        with pytest.raises(InvalidArgumentError, match=f"^f .*{problem}"):
            check_schema(schema, "f")
        return
    check_schema(schema, "f")
    compile_with(backends, "auto", StructuredOutputs(json=schema))


@each_backend
def test_the_properties_of_a_schema_may_have_the_names_of_keywords(name):
    schema = object_of(("title",), title={"type": "string", "pattern": "^a$"}, format=NUMBER)
    outputs = StructuredOutputs(json=schema)
    backend, vocabulary = backend_of(name, KIND), vocabulary_of(KIND)
    constraint = Constraint(backend.load(backend.compile(outputs)), vocabulary, "f")
    assert accepts(constraint.new_matcher(()), '{"title":"a","format":1}')
    assert not accepts(constraint.new_matcher(()), '{"title":"b"}')
    assert jsonschema.Draft202012Validator(schema).is_valid({"title": "a", "format": 1})
