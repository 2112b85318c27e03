"""What constraints say before a backend reads them: whether they can end, and what is closed."""

import pytest

from baton.common.errors import InvalidArgumentError
from engine.constraints.schema import check_schema, close_objects, endless_part
from engine.constraints.xgrammar_rules import endless_rule, regex_refusal, schema_refusal

TREE = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({}, None),
        ({"type": "integer"}, None),
        ({"$ref": "#"}, "#"),
        (TREE, "#"),
        ({**TREE, "required": []}, None),
        ({"anyOf": [TREE["properties"]["n"], {"type": "null"}]}, None),
        ({"allOf": [{"type": "null"}, {"$ref": "#"}]}, "#"),
        ({"type": "array", "items": {"$ref": "#"}}, None),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "#"),
        ({"items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}, None),
        ({"$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/a~1b"}, "#/$defs/a~1b"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "type": "null"}, None),
        ({"$ref": "http://example.com/"}, None),
        ({"const": 1, "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, None),
    ],
)
def test_schemas_without_finite_instances_are_found(schema, part):
    assert endless_part(schema) == part
    if part is not None:
        with pytest.raises(InvalidArgumentError, match="f has no finite instance: #"):
            check_schema(schema, "f")


@pytest.mark.parametrize(
    ("ebnf", "rule"),
    [
        ('root ::= (("a"))', None),
        ('root ::= (("a" root))', "root"),
        ('root ::= (("a" root) | (""))', None),
        ('root ::= (("a" root{0, 1}))', None),
        ('root ::= (("a" root{1, 2}))', "root"),
        ('root ::= ((b))\nb ::= (("\\") | (" b))', "root"),
        ('root ::= ((b))\nb ::= (([a)|\\]] c))\nc ::= (("x") | (b))', None),
        ("root ::= TagDispatch(1 = 2)", None),
        ("", None),
    ],
)
def test_grammars_without_finite_texts_are_found(ebnf, rule):
    assert endless_rule(ebnf) == rule


def test_objects_that_list_properties_are_closed():
    inner = {"type": "object", "properties": {"b": {}}}
    closed = {**inner, "additionalProperties": False}
    assert close_objects(inner) == closed
    assert close_objects({"items": inner}) == {"items": closed}
    assert close_objects({"properties": {"a": inner}})["properties"] == {"a": closed}
    assert close_objects({"$defs": {"a": inner}}) == {"$defs": {"a": closed}}
    assert close_objects({"anyOf": [inner]}) == {"anyOf": [closed]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {}, "additionalProperties": True},
        {"properties": {}, "patternProperties": {}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/b"},
        {"not": {"properties": {"a": {}}}},
    ],
)
def test_objects_that_others_may_add_to_stay_open(schema):
    assert close_objects(schema) == schema


@pytest.mark.parametrize(
    ("schema", "refusal"),
    [
        ({"type": "integer", "minimum": 3, "title": "x"}, None),
        ({"type": "integer", "minimum": 3.5}, "minimum"),
        ({"type": "number", "maximum": 1e-9}, "maximum"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "string"}, None),
        ({"type": "string", "maxLength": 3}, "maxLength"),
        ({"type": "string", "pattern": "^[a-z]+$"}, None),
        ({"type": "string", "pattern": "[a-z]+"}, "pattern"),
        ({"type": "string", "pattern": "^[^a]$"}, "pattern"),
        ({"type": "string", "pattern": "^[ -~]$"}, "pattern"),
        ({"type": "string", "pattern": "^a|b$"}, "pattern"),
        ({"type": "string", "pattern": '^"$'}, "pattern"),
        ({"type": "string", "format": "uuid"}, "format"),
        ({"minimum": 3}, "minimum without type"),
        ({"enum": [1, None]}, None),
        ({"enum": [1, "a"], "type": "integer"}, "enum beside other keywords"),
        ({"const": 1, "minimum": 0}, "const beside other keywords"),
        ({"$ref": "#/$defs/a", "$defs": {}}, None),
        ({"$ref": "#/$defs/a", "maximum": 3}, "maximum beside $ref"),
        ({"$ref": "#/a%20b"}, "$ref"),
        ({"allOf": [{}]}, None),
        ({"allOf": [{}, {}]}, "allOf of several schemas"),
        ({"oneOf": [{}]}, "oneOf without type"),
        ({"not": {}}, "not without type"),
        ({"type": "bogus"}, "type"),
        ({"type": "object", "required": ["a"]}, "required properties that are not listed"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"": {}, "type": "object", "required": ["a"]}, "an empty keyword"),
    ],
)
def test_xgrammar_gets_only_what_it_enforces(schema, refusal):
    assert schema_refusal(schema) == refusal


@pytest.mark.parametrize(
    ("regex", "is_refused"),
    [
        *(("^ab$", False), ("a^b", True), ("^a|b$", True), ("(?:a|b)", False), ("(?=a)", True)),
        *(("[$^]", False), ("\\$\\^", False), ("a|b", False), ("(?i)a", True), ("[\\]$]", False)),
    ],
)
def test_xgrammar_gets_only_the_expressions_that_it_matches(regex, is_refused):
    assert (regex_refusal(regex) is not None) == is_refused
