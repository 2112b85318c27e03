"""Random walks under the masks of random schemas and expressions end in text that obeys them."""

import json
import re

import jsonschema
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from engine.constraints.interface import RefusedError
from engine.constraints.retokenizer import Retokenizer
from engine.constraints.schema import check_schema
from tests.support.constraints import BACKENDS, KINDS, new_matcher, tokenizer_of, vocabulary_of
from tests.support.json_schemas import (
    REGEXES,
    SCHEMAS,
    allowed_tokens,
    schemas_with_refs,
    text_of,
    walk,
)

SETTINGS = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
# Of schemas and of expressions each: 250 texts, a few ms each.
MANY = settings(SETTINGS, max_examples=120)
names, kinds, seeds = st.sampled_from(BACKENDS), st.sampled_from(KINDS), st.integers(0, 2**32)
schemas = st.one_of(SCHEMAS, schemas_with_refs())


def compiled_or_skip(name, kind, **fields):
    """A matcher; skips what the backend says it does not express, or cannot be satisfied."""
    try:
        return new_matcher(name, kind, **fields)
    except RefusedError as refusal:
        event(f"{name} refused: {str(refusal)[:40]}")
        assume(False)


def other(name):
    return BACKENDS[1 - BACKENDS.index(name)]


def check_replays(name, kind, tokens, seed, **fields):
    """Forks and replays on the way change nothing."""
    vocabulary = vocabulary_of(kind)
    matcher = new_matcher(name, kind, **fields)
    middle = seed % (len(tokens) + 1)
    assert matcher.replay(tokens[:middle])
    expected = allowed_tokens(matcher, vocabulary)
    twin = matcher.fork()
    assert matcher.replay(tokens[middle:])
    assert matcher.may_stop
    assert expected == allowed_tokens(twin, vocabulary)
    assert twin.replay(tokens[middle:])
    assert twin.is_terminated == (
        set(allowed_tokens(twin, vocabulary)) <= {*vocabulary.eos_token_ids}
    )


def check_the_other_agrees(name, kind, tokens, **fields):
    """The other backend accepts the text too, unless it refuses the constraint.

    xgrammar knows no integer -0, no escapes of characters in constants, and no numbers of many
    digits between bounds, which llguidance allows. Only xgrammar allows the character DEL, the
    escape of a slash, and zeros behind a number that is a bound, such as -2.50.
    """
    try:
        matcher = new_matcher(other(name), kind, **fields)
    except RefusedError:
        return
    text = text_of(vocabulary_of(kind), tokens)
    if re.search(r"-0\b|\\u|\d{10}|\.\d{7}|\x7f|\\/|\.\d*0\b", text) is None:
        assert matcher.replay(tokens), text
        assert matcher.may_stop


@given(name=names, kind=kinds, schema=schemas, seed=seeds, spaces=st.booleans())
@MANY
def test_walks_under_a_schema_end_in_its_instances(name, kind, schema, seed, spaces):
    fields = {"json": schema, "disable_any_whitespace": not spaces}
    check_schema(schema, "json")
    matcher = compiled_or_skip(name, kind, **fields)
    vocabulary = vocabulary_of(kind)
    tokens = walk(matcher, vocabulary, seed)
    assume(tokens is not None)
    jsonschema.validate(json.loads(text_of(vocabulary, tokens)), schema)
    check_replays(name, kind, tokens, seed, **fields)
    check_the_other_agrees(name, kind, tokens, **fields)


@given(name=names, kind=kinds, regex=REGEXES, seed=seeds)
@MANY
def test_walks_under_an_expression_end_in_its_matches(name, kind, regex, seed):
    matcher = compiled_or_skip(name, kind, regex=regex)
    vocabulary = vocabulary_of(kind)
    tokens = walk(matcher, vocabulary, seed)
    assume(tokens is not None)
    assert re.fullmatch(regex, text_of(vocabulary, tokens)), text_of(vocabulary, tokens)
    check_replays(name, kind, tokens, seed, regex=regex)
    check_the_other_agrees(name, kind, tokens, regex=regex)


@given(
    name=names,
    kind=kinds,
    words=st.lists(
        st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=8),
        min_size=1,
        max_size=5,
    ),
    seed=seeds,
)
@SETTINGS
def test_walks_among_choices_end_in_one_of_them(name, kind, words, seed):
    vocabulary = vocabulary_of(kind)
    tokens = walk(new_matcher(name, kind, choice=words), vocabulary, seed)
    assert text_of(vocabulary, tokens) in words


@given(name=names, kind=kinds, schema=schemas, seed=seeds)
@SETTINGS
def test_forced_tokens_are_forced_text_and_the_tokenizers_own(name, kind, schema, seed):
    fields = {"json": schema, "disable_any_whitespace": True}
    matcher = compiled_or_skip(name, kind, **fields)
    vocabulary = vocabulary_of(kind)
    retokenizer = Retokenizer(tokenizer_of(kind), vocabulary)
    tokens = walk(new_matcher(name, kind, **fields), vocabulary, seed)
    assume(tokens is not None)
    sequence = []
    while not matcher.is_terminated and len(sequence) < len(tokens):
        text = matcher.forced_text()
        forced = retokenizer.forced_tokens(matcher, sequence)
        assert text.startswith(b"".join(vocabulary.tokens[i] for i in forced))
        check_continuations(matcher, retokenizer, sequence, forced)
        if not forced:  # then the walk goes on, as the model would
            allowed = allowed_tokens(matcher, vocabulary)
            forced = [i for i in tokens[len(sequence) :][:1] if i in allowed] or allowed[:1]
            if forced[0] in vocabulary.eos_token_ids:
                break
        assert matcher.replay(forced)
        sequence += forced


def check_continuations(matcher, retokenizer, sequence, forced):
    """Where forced tokens are run in part, the rest is the same."""
    twin, before = matcher.fork(), list(sequence)
    for index, token_id in enumerate(forced):
        assert retokenizer.forced_tokens(twin, before)[: len(forced) - index] == forced[index:]
        assert twin.accept(token_id)
        before.append(token_id)
