"""JSON bodies that are almost right, made of right ones by a seeded generator."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Value = Any


_DEEP = ("@array@", "@object@")
"""Stand for deeply nested values until the text is made: copies of those would be too deep."""

_ODD: tuple[Value, ...] = (
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    64,
    65,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63,
    2**64,
    -(2**64),
    10**30,
    0.0,
    0.5,
    1.0,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "a",
    "0",
    "none",
    "auto",
    "null",
    "\x00",
    "\ud800",
    "a\udfffb",
    "\ufeff",
    "\N{COMBINING ACUTE ACCENT}" * 40,
    "😀" * 40,
    "x" * 300,
    "ab " * 3000,
    "{{ x }}{% for",
    "<think>",
    "</think><tool_call>",
    [],
    {},
    [[]],
    [None],
    [""],
    ["\ud800"],
    [0, "a", None],
    [1] * 300,
    ["a"] * 300,
    {"": None},
    {"a": {"b": [1, None, "\ud800"]}},
    {"\ud800": 1},
    {"type": None},
    {"type": "text", "text": "a"},
    {"type": "function"},
    {"type": "json_object"},
)


def odd_value(rng: random.Random) -> Value:
    """A value of any type, often at a limit."""
    if rng.random() < 0.05:
        return rng.choice(_DEEP)
    return copy.deepcopy(rng.choice(_ODD))


def mutated(rng: random.Random, value: Value) -> Value:
    """A copy of a value with one change at a random place."""
    root = [copy.deepcopy(value)]
    holder, key = _place(rng, root)
    change = rng.random()
    if change < 0.5:
        holder[key] = odd_value(rng)
    elif change < 0.6:
        _remove(holder, key, root)
    elif change < 0.7:
        holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
    elif change < 0.8:
        _insert(rng, holder[key])
    elif change < 0.9:
        other, other_key = _place(rng, root)
        if holder is not root and other is not root:
            holder[key], other[other_key] = (
                copy.deepcopy(other[other_key]),
                copy.deepcopy(holder[key]),
            )
    else:
        holder[key] = str(holder[key]) if rng.random() < 0.5 else odd_value(rng)
    return root[0]


def _place(rng: random.Random, root: list[Value]) -> tuple[Any, Any]:
    """A container and a key of it, at a random depth."""
    holder: Any = root
    key: Any = 0
    while True:
        value = holder[key]
        keys = (
            list(value)
            if isinstance(value, dict)
            else list(range(len(value)))[:50]
            if isinstance(value, list)
            else []
        )
        if not keys or (holder is not root and rng.random() < 0.4):
            return holder, key
        holder, key = value, rng.choice(keys)


def _remove(holder: Any, key: Any, root: list[Value]) -> None:
    if holder is not root:
        del holder[key]


def _insert(rng: random.Random, value: Any) -> None:
    if isinstance(value, list):
        value.insert(rng.randint(0, len(value)), odd_value(rng))
    elif isinstance(value, dict):
        value[rng.choice(("a", "", "type", "text", "\ud800", "suffix", "x" * 300))] = odd_value(rng)


def _plain(rng: random.Random, text: bytes) -> bytes:
    return text


def _torn(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randint(0, len(text))]


def _flipped(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _spliced(rng: random.Random, text: bytes) -> bytes:
    pieces = (
        b"1e999",
        b"9" * 5000,
        b"NaN",
        b"-Infinity",
        b"\\ud800",
        b"\xff",
        b"\xed\xa0\x80",
        b"[" * 2000,
        b'{"a":' * 1500,
        b",",
        b"null",
        b'"',
        b"\x00",
        b"\xef\xbb\xbf",
        b"//",
    )
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(pieces) + text[at:]


def _recoded(rng: random.Random, text: bytes) -> bytes:
    return text.decode(errors="replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))


def _doubled_keys(rng: random.Random, text: bytes) -> bytes:
    return b'{"model":null,"stream":false,"max_tokens":2,' + text[1:] if text[:1] == b"{" else text


_SPOIL: tuple[tuple[float, Callable[[random.Random, bytes], bytes]], ...] = (
    (0.78, _plain),
    (0.03, _torn),
    (0.06, _flipped),
    (0.06, _spliced),
    (0.02, _recoded),
    (0.05, _doubled_keys),
)


def json_bytes(rng: random.Random, value: Value) -> bytes:
    """The text of a value; some texts are no JSON."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    depth = rng.choice((60, 66, 200, 900))
    text = text.replace(f'"{_DEEP[0]}"', "[" * depth + "]" * depth)
    text = text.replace(f'"{_DEEP[1]}"', '{"a":' * depth + "1" + "}" * depth)
    weights, kinds = zip(*_SPOIL, strict=True)
    return rng.choices(kinds, weights)[0](rng, text.encode("utf-8", "surrogatepass"))
