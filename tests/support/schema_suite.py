"""The JSON Schema Test Suite, and random schemas made of its parts."""

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["DRAFTS", "SchemaCase", "mixed_schema", "suite_cases", "suite_files"]

_DATA = Path(__file__).parents[1] / "data" / "json_schema_test_suite.json"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}


@dataclass(frozen=True)
class SchemaCase:
    """A schema of the suite.

    Attributes:
        name: its draft, file and description.
        schema: the schema, with the `$schema` of its draft.
        valid: values that are instances of it.
        invalid: values that are not.
    """

    name: str
    schema: dict[str, Any]
    valid: list[Any]
    invalid: list[Any]


@cache
def _suite():
    return json.loads(_DATA.read_text())


def suite_files():
    """Returns (draft, file) of all files of the suite."""
    return [(draft, name) for draft, files in _suite().items() for name in files]


def suite_cases(draft, file):
    """Returns the cases of a file."""
    return [
        SchemaCase(
            name=f"{draft}/{file}: {case['description']}",
            schema={"$schema": DRAFTS[draft], **case["schema"]},
            valid=case["valid"],
            invalid=case["invalid"],
        )
        for case in _suite()[draft][file]
    ]


@cache
def _parts():
    """All schemas, and objects in them, that refer to no others."""
    parts: list[dict[str, Any]] = []

    def collect(value):
        if isinstance(value, dict):
            if value and not any(key in json.dumps(value) for key in ("$ref", "$id", "$dynamic")):
                parts.append(value)
            for child in value.values():
                collect(child)
        elif isinstance(value, list):
            for child in value:
                collect(child)

    for case in (case for file in _suite()["draft2020-12"].values() for case in file):
        collect(case["schema"])
    return parts


def _places(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value or ())
    for key, child in items:
        if isinstance(child, dict | list):
            yield from _places(child, (*path, key))
        else:
            yield (*path, key)


def mixed_schema(seed, others=()):
    """Returns the keywords of two random parts of the suite together, or a part in which
    something is replaced: by another part, or by one of `others`.
    """
    drawn = random.Random(seed)
    first, second = drawn.choice(_parts()), drawn.choice(_parts())
    places = list(_places(first))
    if not others and (not places or drawn.random() < 0.5):
        return {**first, **second}
    schema = json.loads(json.dumps(first))
    *way, last = drawn.choice(places or [("type",)])
    inner = schema
    for step in way:
        inner = inner[step]
    inner[last] = drawn.choice(others) if others else second
    return schema
