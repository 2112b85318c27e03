"""The subset of JSON Schema and regular expressions that xgrammar enforces, by experiment.

Random texts under the masks of xgrammar 0.2 were checked with `jsonschema`. These rules accept
only what held; all else goes to llguidance, which enforces a schema as a whole or refuses it.
Left out without an error were, among others: `uniqueItems`, `contains`, `not`, `if`, `allOf` of
several schemas, keywords beside `$ref` and `anyOf`, keywords without a `type`, `dependentRequired`,
required properties that are not listed, values of `enum` of another type, unknown formats, dates
such as 31 November, large `multipleOf`, bounds near 0, anchors within a regular expression. With
`minLength`, `maxLength` and patterns such as `[^a]` or `"`, strings were no JSON: their control
characters and quotes were not escaped.

`endless_rule` finds grammars without any finite text in the EBNF that xgrammar writes them as.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from engine.constraints.schema_keywords import BOUNDS

__all__ = ["endless_rule", "regex_refusal", "schema_refusal"]

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly",
     "writeOnly", "nullable", "$schema", "$comment", "$defs", "definitions")
)  # fmt: skip
_KEYWORDS: dict[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": frozenset(BOUNDS),
    "number": frozenset(BOUNDS),
    "string": frozenset(("pattern",)),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "unevaluatedProperties", "propertyNames")
    ),
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "string": str,
    "array": list,
    "object": dict,
}
_ALONE = ("$ref", "anyOf", "allOf", "enum", "const")
_SMALLEST_BOUND, _LARGEST_BOUND = 1e-4, 1e15
# Literals that JSON need not escape, classes of them, groups, repetitions.
_ESCAPED = r"\\[dw.*+?()\[\]{}|/-]"
_RANGE = r"(?:[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]|[^\x00-\x7f]-[^\x00-\x7f])"
_CLASS = rf"\[(?:{_RANGE}|{_ESCAPED}|[\w ,.:;@#%&=!<>~'/*+?(){{}}|])+-?\]"
_PLAIN_PATTERN = re.compile(rf"(?:{_CLASS}|{_ESCAPED}|[\w \-,:;@#%&=!<>~'/*+?(){{}}|])*")
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<literal>"(?:\\.|[^"\\])*" | \[(?:\\.|[^\]\\])*\])
        | (?P<rule>[A-Za-z_][\w.-]*)
        | (?P<repeat>\{\s*(?P<least>\d+)[^}]*\})
        | (?P<sign>[()|])
    )""",
    re.VERBOSE | re.DOTALL,
)
# What a rule's body consists of: alternatives of sequences of rule names and bodies.
_Body = list[list["str | _Body"]]


def schema_refusal(node: Mapping[str, Any]) -> str | None:
    """Returns the part of a schema, without those in it, that xgrammar may not enforce, or None."""
    keywords = node.keys() - _ANNOTATIONS
    for keyword in _ALONE:
        if keyword in keywords:
            return _alone_refusal(keyword, node, keywords)
    kinds = node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds is None:
        return f"{min(keywords)} without type" if keywords else None
    if not isinstance(kinds, list) or not all(isinstance(name, str) for name in kinds):
        return "type"
    if not kinds or not _KEYWORDS.keys() >= set(kinds):
        return "type"
    unknown = keywords - {"type"} - frozenset().union(*(_KEYWORDS[kind] for kind in kinds))
    if unknown:
        return min(unknown) or "an empty keyword"
    return _value_refusal(node, "integer" in kinds)


def _alone_refusal(keyword: str, node: Mapping[str, Any], keywords: set[str]) -> str | None:
    """Refuses keywords beside one that xgrammar reads alone."""
    others = keywords - {keyword}
    value = node[keyword]
    if keyword in ("enum", "const"):
        values = value if keyword == "enum" and isinstance(value, list) else [value]
        is_typed = "type" not in node or all(_has_type(node["type"], allowed) for allowed in values)
        return None if others <= {"type"} and is_typed else f"{keyword} beside other keywords"
    if others:
        return f"{min(others)} beside {keyword}"
    if keyword == "$ref" and not (isinstance(value, str) and re.fullmatch(r"#[^~%]*", value)):
        return "$ref"
    if keyword == "allOf" and not (isinstance(value, list) and len(value) == 1):
        return "allOf of several schemas"
    return None


def _has_type(kind: Any, value: Any) -> bool:
    """Whether a value is of a type that a schema names; False for several types."""
    is_boolean = isinstance(value, bool)
    is_known = isinstance(kind, str) and kind in _TYPES
    return is_known and is_boolean == (kind == "boolean") and isinstance(value, _TYPES[kind])


def _value_refusal(node: Mapping[str, Any], has_integers: bool) -> str | None:
    if "pattern" in node and not _is_plain_pattern(node["pattern"]):
        return "pattern"
    for bound in BOUNDS:
        if bound in node and not _is_plain_bound(node[bound], has_integers):
            return bound
    properties, required = node.get("properties", {}), node.get("required", [])
    if not isinstance(properties, dict):
        return "properties"
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required"
    if not properties.keys() >= set(required):
        return "required properties that are not listed"
    if "propertyNames" in node and properties:
        return "propertyNames with properties"
    return None


def _is_plain_bound(value: Any, is_integer: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if is_integer and not isinstance(value, int):
        return False
    return value == 0 or _SMALLEST_BOUND <= abs(value) < _LARGEST_BOUND


def _is_plain_pattern(pattern: Any) -> bool:
    """Whether a pattern describes the whole string and needs no escapes of JSON."""
    if not isinstance(pattern, str) or not re.fullmatch(r"\^.*\$", pattern):
        return False
    body = pattern[1:-1]
    return bool(_PLAIN_PATTERN.fullmatch(body)) and "(?" not in body and not _has_open_choice(body)


def _has_open_choice(pattern: str) -> bool:
    """Whether a pattern has a `|` outside of groups: then its anchors belong to a part of it."""
    bare = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "", pattern)
    depth = 0
    for char in bare:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return True
    return False


def regex_refusal(regex: str) -> str | None:
    """Returns the part of a regular expression that xgrammar may not enforce, or None."""
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", regex, flags=re.DOTALL)
    if "(?" in bare.replace("(?:", ""):
        return "a group that begins with (?"
    inner = bare.removeprefix("^").removesuffix("$")
    if "^" in inner or "$" in inner:
        return "an anchor within the expression"
    if inner != bare and _has_open_choice(regex):
        return "an anchor beside a choice"
    return None


def endless_rule(ebnf: str) -> str | None:
    """Returns the first rule without any finite text if the root is such a one, else None.

    Args:
        ebnf: `str()` of a grammar of xgrammar. None is returned for what is no plain EBNF.
    """
    rules: dict[str, _Body] = {}
    for line in ebnf.splitlines():
        if not line.strip():
            continue
        name, separator, body = line.partition(" ::= ")
        parsed = _parse(body)
        if not separator or parsed is None:
            return None
        rules[name] = parsed
    finite: set[str] = set()
    while newly_finite := {
        n for n, body in rules.items() if n not in finite and _ends(body, finite)
    }:
        finite |= newly_finite
    if "root" in finite:
        return None
    return next((name for name in rules if name not in finite), None)


def _parse(text: str) -> _Body | None:
    tokens = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match)
        position = match.end()
    remaining = iter(tokens)
    body = _alternatives(remaining)
    return body if next(remaining, None) is None else None


def _alternatives(tokens: Iterator[re.Match[str]]) -> _Body:
    """Reads up to the closing parenthesis, or the end."""
    body: _Body = [[]]
    for match in tokens:
        if match["sign"] == ")":
            break
        if match["sign"] == "|":
            body.append([])
        elif match["sign"] == "(":
            body[-1].append(_alternatives(tokens))
        elif match["rule"]:
            body[-1].append(match["rule"])
        elif match["repeat"] and int(match["least"]) == 0 and body[-1]:
            body[-1].pop()  # it need not occur
    return body


def _ends(body: _Body, finite: set[str]) -> bool:
    """Whether a body has a finite text, given the rules that are known to."""
    return any(
        all(part in finite if isinstance(part, str) else _ends(part, finite) for part in sequence)
        for sequence in body
    )
