"""JSON schemas before a backend reads them: which keywords they use, and whether they can end."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from baton.common.errors import InvalidArgumentError
from baton.common.request.schema_parts import references_of
from engine.constraints.schema_keywords import problems_of, without_annotations

__all__ = [
    "change_children",
    "check_schema",
    "close_objects",
    "endless_part",
    "prepare",
    "subschemas",
    "without_problems",
]

_IN_MAPPING = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_DIRECT = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "items", "contains"),
    *("additionalItems", "unevaluatedItems", "not", "if", "then", "else"),
)
_OF_OBJECTS = ("properties", "required", "patternProperties", "additionalProperties")
_OF_ARRAYS = ("items", "prefixItems", "minItems")


def check_schema(schema: Any, field: str) -> None:
    """Refuses a schema that is malformed, or that a backend would compile to something else.

    Args:
        schema: the schema.
        field: the user's field, for the error.

    Raises:
        InvalidArgumentError: a keyword has a value that it does not take, the schema has no finite
            instance, has bounds past 64 bits, or is of a draft before 4.
    """
    if not isinstance(schema, Mapping):
        return
    for path, node in subschemas(schema):
        if (problem := next(problems_of(path, node), None)) is not None:
            raise InvalidArgumentError(f"{field} {problem.text}")
    if part := endless_part(schema):
        raise InvalidArgumentError(f"{field} has no finite instance: {part} requires itself")


def subschemas(schema: Any, path: str = "#") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields a schema and every schema in it, each with its JSON pointer."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for child_path, child in _children(schema, path):
        yield from subschemas(child, child_path)


def _children(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for keyword in _IN_MAPPING:
        if isinstance(schema.get(keyword), Mapping):
            for name, child in schema[keyword].items():
                yield f"{path}/{keyword}/{_pointer_step(name)}", child
    for keyword in (*_IN_LIST, "items"):
        if isinstance(schema.get(keyword), list):
            for index, child in enumerate(schema[keyword]):
                yield f"{path}/{keyword}/{index}", child
    for keyword in _DIRECT:
        if isinstance(schema.get(keyword), Mapping):
            yield f"{path}/{keyword}", schema[keyword]


def change_children(
    schema: Mapping[str, Any],
    change: Callable[[Any], Any],
    keywords: Collection[str] = (*_IN_MAPPING, *_IN_LIST, *_DIRECT),
) -> dict[str, Any]:
    """Returns a copy of a schema with other schemas in it, or in some of its keywords.

    `true` and `false` are schemas too.
    """
    changed = dict(schema)
    for keyword, value in schema.items():
        if keyword not in keywords:
            continue
        if keyword in _IN_MAPPING and isinstance(value, Mapping):
            changed[keyword] = {name: change(child) for name, child in value.items()}
        elif keyword in (*_IN_LIST, "items") and isinstance(value, list):
            changed[keyword] = [change(child) for child in value]
        elif keyword in _DIRECT and isinstance(value, Mapping):
            changed[keyword] = change(value)
    return changed


def _pointer_step(name: str) -> str:
    """Returns a property's name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def without_problems(schema: Any) -> Any:
    """Returns a schema without the keywords that have values they do not take."""
    if not isinstance(schema, Mapping):
        return schema if isinstance(schema, bool) else {}
    wrong = {problem.keyword for problem in problems_of("#", schema)}
    kept = {name: value for name, value in schema.items() if name not in wrong}
    return change_children(kept, without_problems)


def prepare(schema: Any) -> Any:
    """Returns a schema as backends get it: without annotations, and with closed objects."""
    # Schemas may lie under any keyword that a reference names.
    referenced = {step for reference in references_of(schema) for step in reference.split("/")}

    def change(node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node
        named = {name: value for name, value in node.items() if name in referenced}
        return change_children(named | without_annotations(node), change)

    return close_objects(change(schema))


def close_objects(schema: Any) -> Any:
    """Returns a schema whose objects have only the properties that it lists.

    An object with `properties` that says nothing of others gets `additionalProperties: false`:
    a model would otherwise add properties without end. Those that it requires and does not list may
    have any value. Schemas that are combined with others by
    `allOf` or `$ref` are left alone, since each lists only a part of the properties.
    """
    return _closed(schema, is_part=False)


def _closed(value: Any, *, is_part: bool) -> Any:
    if not isinstance(value, dict):
        return value
    is_combined = "allOf" in value or "$ref" in value
    closed = dict(value)
    for keyword in _IN_MAPPING:
        if isinstance(value.get(keyword), dict):
            closed[keyword] = {
                name: _closed(child, is_part=False) for name, child in value[keyword].items()
            }
    for keyword in (*_IN_LIST, "items"):
        if isinstance(value.get(keyword), list):
            in_part = keyword in ("allOf", "anyOf", "oneOf") and (
                is_part or keyword == "allOf" or "properties" in value or is_combined
            )
            closed[keyword] = [_closed(child, is_part=in_part) for child in value[keyword]]
    for keyword in _DIRECT:
        if isinstance(value.get(keyword), dict):
            closed[keyword] = _closed(value[keyword], is_part=keyword in ("not", "if"))
    is_listed = "properties" in value and not any(
        keyword in value
        for keyword in ("additionalProperties", "unevaluatedProperties", "patternProperties")
    )
    if is_listed and not is_part and not is_combined:
        closed["additionalProperties"] = False
        if isinstance(required := value.get("required"), list):
            unlisted = {name: True for name in required if name not in value["properties"]}
            closed["properties"] = closed["properties"] | unlisted
    return closed


def endless_part(schema: Mapping[str, Any]) -> str | None:
    """Returns the JSON pointer of a part that makes every instance of the schema infinite.

    An example is an object that requires a property of its own kind. None: the schema has
    finite instances, as far as its structure says.
    """
    nodes = dict(subschemas(schema))
    finite: set[str] = set()
    while True:
        newly_finite = {path for path in nodes if path not in finite and _ends(path, nodes, finite)}
        if not newly_finite:
            break
        finite |= newly_finite
    if "#" in finite:
        return None
    recursive = {_target(node["$ref"]) for node in nodes.values() if "$ref" in node}
    return next((path for path in nodes if path not in finite and path in recursive), "#")


def _ends(path: str, nodes: Mapping[str, Mapping[str, Any]], finite: set[str]) -> bool:
    """Whether a schema has a finite instance, given those that are known to."""

    def child_ends(child_path: str, child: Any) -> bool:
        return child is not False and (not isinstance(child, Mapping) or child_path in finite)

    node = nodes[path]
    target = _target(node.get("$ref"))
    if target in nodes and target not in finite:
        return False
    for keyword, needs in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        children = node.get(keyword)
        if isinstance(children, list) and not needs(
            child_ends(f"{path}/{keyword}/{i}", child) for i, child in enumerate(children)
        ):
            return False
    if "enum" in node or "const" in node:
        return True
    kinds = node.get("type", _kinds_without_type(node))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or any(kind not in ("object", "array") for kind in kinds):
        return True
    return ("object" in kinds and _object_ends(path, node, child_ends)) or (
        "array" in kinds and _array_ends(path, node, child_ends)
    )


def _kinds_without_type(node: Mapping[str, Any]) -> list[str]:
    """The kinds of instances of a schema without `type`, as backends read it."""
    kinds = ["object"] if any(keyword in node for keyword in _OF_OBJECTS) else []
    kinds += ["array"] if any(keyword in node for keyword in _OF_ARRAYS) else []
    return kinds or ["any"]


def _object_ends(path: str, node: Mapping[str, Any], child_ends: Any) -> bool:
    properties = node.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = node.get("required")
    names = required if isinstance(required, list) else []
    for name in names:
        if isinstance(name, str) and name in properties:
            path_of_property = f"{path}/properties/{_pointer_step(name)}"
            if not child_ends(path_of_property, properties[name]):
                return False
    return True


def _array_ends(path: str, node: Mapping[str, Any], child_ends: Any) -> bool:
    least = node.get("minItems", 0)
    least = least if isinstance(least, int) else 0
    prefix = node.get("prefixItems")
    prefix = prefix if isinstance(prefix, list) else []
    for index, child in enumerate(prefix[:least]):
        if not child_ends(f"{path}/prefixItems/{index}", child):
            return False
    return least <= len(prefix) or child_ends(f"{path}/items", node.get("items", True))


def _target(ref: Any) -> str:
    """The JSON pointer that a local `$ref` means, written as `subschemas` writes it."""
    return unquote(ref).rstrip("/") if isinstance(ref, str) else ""
