"""Random JSON schemas and regular expressions, and random walks under the masks of a matcher."""

import random

import hypothesis.strategies as st
import numpy as np

NAMES = ("a", "name", "größe", "x y", 'q"t')
PATTERNS = ("[a-z]{2,4}", "^\\d{3}-\\d{2}$", "^(foo|ba[rz])+$", "^[A-F0-9]{8}$", "^\\w*!$")
# What a walk that should end prefers: an end, then what closes strings and brackets.
_CLOSING = (b'"', b"}", b"]")


def _sorted_pair(values, low, high):
    return st.tuples(values, values).map(sorted).map(lambda pair: {low: pair[0], high: pair[1]})


def _some_of(bounds):
    """Any part of a dict of bounds."""
    return st.tuples(bounds, st.sets(st.integers(0, 1))).map(
        lambda drawn: {k: v for i, (k, v) in enumerate(drawn[0].items()) if i in drawn[1]}
    )


INTEGERS = _some_of(_sorted_pair(st.integers(-1000, 1000), "minimum", "maximum")).map(
    lambda bounds: {"type": "integer", **bounds}
)
NUMBERS = _some_of(
    _sorted_pair(st.sampled_from([-2.5, -1, 0, 0.25, 1, 10, 99.5]), "minimum", "maximum").filter(
        lambda pair: pair["minimum"] < pair["maximum"]
    )
).map(lambda bounds: {"type": "number", **bounds})
STRINGS = st.one_of(
    _some_of(_sorted_pair(st.integers(0, 6), "minLength", "maxLength")).map(
        lambda bounds: {"type": "string", **bounds}
    ),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.sampled_from(["", "a", "a\nb", "ü", '"\\'])
)
LEAVES = st.one_of(
    INTEGERS,
    NUMBERS,
    STRINGS,
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    st.sampled_from(["string", "integer", "boolean"]).map(lambda kind: {"type": [kind, "null"]}),
)


def _objects(children):
    def build(drawn):
        properties, required = drawn
        return {
            "type": "object",
            "properties": properties,
            "required": sorted(name for name in properties if NAMES.index(name) in required),
            "additionalProperties": False,
        }

    names = st.dictionaries(st.sampled_from(NAMES), children, min_size=1, max_size=3)
    return st.tuples(names, st.sets(st.integers(0, len(NAMES) - 1))).map(build)


def _arrays(children):
    sizes = _some_of(_sorted_pair(st.integers(0, 3), "minItems", "maxItems"))
    return st.tuples(children, sizes).map(lambda d: {"type": "array", "items": d[0], **d[1]})


def _compound(children):
    return st.one_of(
        _objects(children),
        _arrays(children),
        st.lists(children, min_size=2, max_size=3).map(lambda parts: {"anyOf": parts}),
    )


SCHEMAS = st.recursive(LEAVES, _compound, max_leaves=6)


@st.composite
def schemas_with_refs(draw):
    """A schema of an object that refers to definitions, one of them recursive."""
    return {
        "$defs": {
            "leaf": draw(LEAVES),
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"$ref": "#/$defs/leaf"},
                    "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            },
        },
        "$ref": "#/$defs/tree",
    }


REGEX_ATOMS = st.sampled_from(
    ["a", "[a-c]", "[^x\\n]", "\\d", "é", "\\.", "(?:ab|cd)", "[0-9A-F]", "日", " "]
)


def _compound_regexes(children):
    bounds = st.tuples(st.integers(0, 2), st.integers(0, 3))
    return st.one_of(
        st.tuples(children, st.sampled_from("*+?")).map(lambda d: f"(?:{d[0]}){d[1]}"),
        st.tuples(children, bounds).map(lambda d: f"(?:{d[0]}){{{d[1][0]},{sum(d[1])}}}"),
        st.lists(children, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.lists(children, min_size=2, max_size=3).map("".join),
    )


REGEXES = st.recursive(REGEX_ATOMS, _compound_regexes, max_leaves=6)


def allowed_tokens(matcher, vocabulary):
    """The token ids that a matcher's mask allows."""
    row = np.zeros(vocabulary.num_mask_words, dtype=np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[vocabulary.size :].any(), "bits past the vocabulary"
    return np.flatnonzero(bits).tolist()


def walk(matcher, vocabulary, seed, *, num_free=40, num_most=400):
    """Draws random tokens under the masks until the text may end and does.

    Returns:
        The tokens, without the stop token; None if the walk did not end in `num_most` tokens.
    """
    drawn = random.Random(seed)
    tokens = []
    while len(tokens) < num_most:
        allowed = allowed_tokens(matcher, vocabulary)
        if not allowed:
            assert matcher.is_terminated
            return tokens
        stops = [i for i in allowed if i in vocabulary.eos_token_ids]
        assert bool(stops) == matcher.may_stop
        assert matcher.is_terminated == (len(stops) == len(allowed))
        hurries = len(tokens) >= num_free
        if matcher.is_terminated or (stops and (hurries or drawn.random() < 0.2)):
            return tokens
        # xgrammar allows surrogates in UTF-8, which begin with this byte; they are no text.
        texts = [i for i in allowed if i not in stops and vocabulary.tokens[i][-1:] != b"\xed"]
        tokens.append(_next_token(drawn, texts, vocabulary, hurries))
        assert matcher.accept(tokens[-1])
    return None


def _next_token(drawn, texts, vocabulary, hurries):
    if hurries:
        for closing in _CLOSING:
            for token_id in texts:
                if vocabulary.tokens[token_id] == closing:
                    return token_id
    return drawn.choice(texts)


def text_of(vocabulary, tokens):
    return b"".join(vocabulary.tokens[i] for i in tokens).decode()
