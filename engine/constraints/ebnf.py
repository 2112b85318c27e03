"""Whether a grammar has any finite text, from the EBNF that xgrammar writes it as."""

import re
from collections.abc import Iterator

__all__ = ["endless_rule"]

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
