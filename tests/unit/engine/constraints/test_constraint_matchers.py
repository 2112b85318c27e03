"""Masks and positions of the grammar backends, against acceptance token by token."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from baton.common.errors import InvalidArgumentError
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.backends import load_backend
from engine.constraints.compiler import marks_of
from engine.constraints.interface import MAX_WHITESPACE, RefusedError
from engine.constraints.matcher import Constraint
from engine.constraints.vocabulary import Vocabulary
from tests.support.constraints import (
    BACKENDS,
    KINDS,
    backend_of,
    constraint_of,
    new_matcher,
    vocabulary_of,
)
from tests.support.json_schemas import allowed_tokens, text_of, walk

pytestmark = pytest.mark.sampled(one_in=2)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["größe", "x y"]},
    },
    "required": ["name", "age", "kind"],
}
FORMS = {
    "json": {"json": PERSON},
    "json_object": {"json_object": True},
    "regex": {"regex": r"(ab|日本)*[0-9]{2,3}(\.\d)?"},
    "choice": {"choice": ["yes", "no", 'maybe "\\\n', "nope", "größe😀"]},
    "gbnf": {"grammar": 'root ::= item ("," item)*\nitem ::= [a-z]+ | "日"'},
    "lark": {"grammar": 'start: item ("," item)*\nitem: /[a-z]+/ | "日"'},
}
each_backend = pytest.mark.parametrize("name", BACKENDS)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_form = pytest.mark.parametrize("form", FORMS)


def accepted_one_by_one(matcher, vocabulary):
    """The tokens that the mask must allow: those that forks accept, and stops at an end."""
    stops = vocabulary.eos_token_ids if matcher.may_stop else ()
    return [i for i in range(vocabulary.size) if i in stops or matcher.fork().accept(i)]


def type_text(matcher, vocabulary, text):
    """Accepts a text byte by byte, with single-byte tokens."""
    singles = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}
    for byte in text.encode():
        assert matcher.accept(singles[bytes([byte])]), f"{byte:#x} of {text!r}"


@each_backend
@each_kind
@each_form
def test_the_mask_is_what_a_fork_accepts(name, kind, form):
    vocabulary = vocabulary_of(kind)
    for seed in range(3):
        matcher = new_matcher(name, kind, **FORMS[form])
        tokens = walk(new_matcher(name, kind, **FORMS[form]), vocabulary, seed, num_free=8)
        for token_id in tokens[:12]:
            expected = accepted_one_by_one(matcher, vocabulary)
            assert allowed_tokens(matcher, vocabulary) == expected
            assert matcher.accept(token_id)
        assert allowed_tokens(matcher, vocabulary) == accepted_one_by_one(matcher, vocabulary)


@each_backend
@each_kind
def test_choices_are_the_only_texts(name, kind):
    vocabulary, choices = vocabulary_of(kind), FORMS["choice"]["choice"]
    texts = {
        text_of(vocabulary, walk(new_matcher(name, kind, choice=choices), vocabulary, seed))
        for seed in range(40)
    }
    assert texts <= set(choices)
    assert len(texts) > 2


@each_backend
@each_kind
def test_a_json_object_is_an_object(name, kind):
    vocabulary = vocabulary_of(kind)
    matchers = [new_matcher(name, kind, json_object=True) for _ in range(10)]
    walks = [walk(matcher, vocabulary, seed) for seed, matcher in enumerate(matchers)]
    complete = [tokens for tokens in walks if tokens is not None]
    assert len(complete) >= 5
    for tokens in complete:
        assert isinstance(json.loads(text_of(vocabulary, tokens)), dict)


@each_backend
@each_kind
def test_without_whitespace_json_is_compact(name, kind):
    vocabulary = vocabulary_of(kind)
    matcher = new_matcher(name, kind, json=PERSON, disable_any_whitespace=True)
    text = text_of(vocabulary, walk(matcher, vocabulary, 1))
    assert text == json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))


@each_backend
@each_kind
@each_form
def test_fork_and_replay_give_the_same_masks(name, kind, form):
    vocabulary = vocabulary_of(kind)
    tokens = walk(new_matcher(name, kind, **FORMS[form]), vocabulary, 5, num_free=12)
    matcher, masks, forks = new_matcher(name, kind, **FORMS[form]), [], []
    for token_id in tokens:
        masks.append(allowed_tokens(matcher, vocabulary))
        forks.append(matcher.fork())
        assert matcher.accept(token_id)
    for num_kept in range(len(tokens)):
        assert allowed_tokens(forks[num_kept], vocabulary) == masks[num_kept]
        again = new_matcher(name, kind, **FORMS[form])
        assert again.replay(tokens[:num_kept])
        assert allowed_tokens(again, vocabulary) == masks[num_kept]


@each_backend
@each_kind
def test_stop_tokens_are_allowed_at_the_end_alone(name, kind):
    vocabulary = vocabulary_of(kind)
    (eos,) = vocabulary.eos_token_ids
    padding = vocabulary.size - 1  # an id without a token, as a user's stop token
    matcher = constraint_of(name, kind, regex="ab?").new_matcher({eos, padding})
    assert not matcher.may_stop
    assert not matcher.accept(eos)
    type_text(matcher, vocabulary, "a")
    assert matcher.may_stop
    assert not matcher.is_terminated
    assert {eos, padding} < set(allowed_tokens(matcher, vocabulary))
    type_text(matcher, vocabulary, "b")
    assert matcher.is_terminated
    assert allowed_tokens(matcher, vocabulary) == sorted([eos, padding])
    assert not matcher.accept(padding)
    assert not matcher.accept(eos)
    assert matcher.is_terminated


@each_backend
@each_kind
def test_without_stop_tokens_a_complete_text_ends_with_an_empty_mask(name, kind):
    vocabulary = vocabulary_of(kind)
    matcher = constraint_of(name, kind, choice=["a"]).new_matcher(())
    type_text(matcher, vocabulary, "a")
    assert matcher.is_terminated
    assert allowed_tokens(matcher, vocabulary) == []


@each_backend
@each_kind
def test_structural_tags_constrain_only_what_follows_a_trigger(name, kind):
    vocabulary = vocabulary_of(kind)
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    tag = {
        "structures": [{"begin": "<f=x>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f="],
    }
    matcher = new_matcher(name, kind, structural_tag=tag)
    type_text(matcher, vocabulary, "any text < at all ")
    assert matcher.may_stop
    type_text(matcher, vocabulary, "<f=")
    assert not matcher.may_stop
    assert matcher.forced_text().startswith(b"x>")
    type_text(matcher, vocabulary, 'x>{"a":')
    assert b"n" in {vocabulary.tokens[i] for i in allowed_tokens(matcher, vocabulary)}
    assert b"1" not in {vocabulary.tokens[i] for i in allowed_tokens(matcher, vocabulary)}
    type_text(matcher, vocabulary, "null}</f>more")
    assert matcher.may_stop


@each_backend
def test_the_newer_form_of_structural_tags(name):
    vocabulary = vocabulary_of("byte_level")
    tag = {
        "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
    }
    matcher = new_matcher(name, "byte_level", structural_tag=tag)
    assert matcher.forced_text() == b"<a>"
    type_text(matcher, vocabulary, "<a>free</a>")
    assert matcher.is_terminated


def test_llguidance_refuses_structural_tags_that_it_cannot_write():
    for form in {"type": "regex", "pattern": "a"}, {"type": "any_text", "excludes": ["a"]}:
        with pytest.raises(RefusedError, match="in a structural tag"):
            new_matcher("llguidance", "byte_level", structural_tag={"format": form})


@each_backend
def test_a_special_token_counts_as_its_name_where_a_tag_has_it(name):
    special = {1: "<s>", 2: "[CALL]"}
    tokens = (b"", b"", b"", *(bytes([byte]) for byte in range(256)))
    vocabulary = Vocabulary(tokens, {0: "</s>", **special}, (0,))
    backend = load_backend(name, vocabulary)
    elements = [
        {"type": "const_string", "value": "[CALL]"},
        {"type": "json_schema", "json_schema": INTEGERS},
    ]
    outputs = StructuredOutputs(
        structural_tag={"format": {"type": "sequence", "elements": elements}}
    )
    grammar = backend.load(backend.compile(outputs))
    marks = marks_of(outputs, vocabulary)
    assert marks == {2: b"[CALL]"}
    matcher = Constraint(grammar, vocabulary, "f", marks).new_matcher((0,))
    assert allowed_tokens(matcher, vocabulary) == [2, 3 + ord("[")]
    assert not matcher.accept(1)
    assert matcher.forced_text().startswith(b"[CALL]{")
    spelled = matcher.fork()
    assert spelled.replay([3 + byte for byte in b'[CALL]{"a":1}'])
    assert matcher.replay([2, *(3 + byte for byte in b'{"a":1}')])
    assert spelled.may_stop
    assert matcher.may_stop
    assert not matcher.accept(2)


def test_whitespace_patterns_are_llguidances_alone():
    vocabulary = vocabulary_of("byte_level")
    with pytest.raises(RefusedError, match="whitespace_pattern"):
        new_matcher("xgrammar", "byte_level", json=PERSON, whitespace_pattern=" ")
    matcher = new_matcher("llguidance", "byte_level", json=PERSON, whitespace_pattern="_")
    type_text(matcher, vocabulary, '{_"name":_"Xa"')


def test_a_schema_cannot_turn_its_own_enforcement_off():
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(RefusedError, match="uniqueItems"):
        new_matcher("llguidance", "byte_level", json=schema)


@each_backend
def test_a_vocabulary_that_cannot_write_the_text_is_an_error(name):
    vocabulary = Vocabulary((b"a", b"b", b""), {2: "</s>"}, (2,))
    backend = load_backend(name, vocabulary)
    grammar = backend.load(backend.compile(StructuredOutputs(choice=["ac"])))
    matcher = Constraint(grammar, vocabulary, "structured_outputs.choice").new_matcher({2})
    row = np.zeros(1, dtype=np.int32)
    matcher.fill_mask(row)
    assert matcher.accept(0)
    with pytest.raises(InvalidArgumentError, match=r"structured_outputs\.choice allows no token"):
        matcher.fill_mask(row)


def test_a_slow_grammar_ends_its_own_sequence(monkeypatch):
    now_s = [0.0]
    clock = SimpleNamespace(thread_time=lambda: now_s[0])
    monkeypatch.setattr("engine.constraints.matcher.time", clock)
    matcher = new_matcher("xgrammar", "byte_level", json_object=True)

    class SlowState:
        def __getattr__(self, name):
            return getattr(state, name)

        def fill_mask(self, row):
            state.fill_mask(row)
            now_s[0] += 0.03

    state = matcher._state
    matcher._state = SlowState()
    row = np.zeros(vocabulary_of("byte_level").num_mask_words, dtype=np.int32)

    def fill(times):
        for _ in range(times):
            matcher._row = None  # as after a token
            matcher.fill_mask(row)

    fill(times=20)  # the burst allows it
    with pytest.raises(InvalidArgumentError, match=r"json_object took 30 ms for one token"):
        fill(times=10)


@each_backend
@each_kind
@pytest.mark.parametrize("regex", ["a{2000}[a-z]+", "(The quick ){90}[a-z]"])
def test_forced_text_is_bounded(name, kind, regex):
    matcher = new_matcher(name, kind, regex=regex)
    text, num_calls = b"", 0
    while forced := matcher.forced_text():
        assert len(forced) <= 128
        byte_tokens = vocabulary_of(kind).byte_tokens
        assert matcher.replay(byte_tokens[byte] for byte in forced)
        text += forced
        num_calls += 1
    assert num_calls == -(-len(text) // 128)
    assert text == (b"a" * 2000 if regex[0] == "a" else b"The quick " * 90)


def num_accepted(matcher, vocabulary, text, char):
    """How many of a character are accepted after a text, up to 100."""
    type_text(matcher, vocabulary, text)
    (token,) = [i for i, piece in enumerate(vocabulary.tokens) if piece == char.encode()][:1]
    return next((count for count in range(100) if not matcher.accept(token)), 100)


INTEGERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAGGED = {"structures": [{"begin": "<f>", "schema": INTEGERS, "end": "</f>"}], "triggers": ["<f>"]}


@each_backend
@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"json": INTEGERS}, ""),
        ({"json_object": True}, ""),
        ({"structural_tag": TAGGED}, "<f>"),
    ],
)
@pytest.mark.parametrize("text", ["{", '{"a"', '{"a":', '{"a":1', '{ "a"\n: \r\n\t1'])
def test_whitespace_between_the_tokens_of_json_ends(name, fields, start, text):
    vocabulary = vocabulary_of("byte_level")
    for char in " \n\t":
        matcher = new_matcher(name, "byte_level", **fields)
        assert num_accepted(matcher, vocabulary, start + text, char) == MAX_WHITESPACE


@each_backend
@pytest.mark.parametrize(("limit", "expected"), [(3, 3), (0, 0), (None, 100)])
def test_the_operator_may_state_another_amount_of_whitespace(name, limit, expected):
    vocabulary, backend = vocabulary_of("byte_level"), backend_of(name, "byte_level")
    for outputs in (StructuredOutputs(json=INTEGERS), StructuredOutputs(json_object=True)):
        grammar = backend.load(backend.compile(outputs, limit))
        matcher = Constraint(grammar, vocabulary, "f").new_matcher(())
        assert num_accepted(matcher, vocabulary, '{"a":', " ") == expected


def test_a_stated_pattern_of_whitespace_outweighs_the_limit():
    vocabulary = vocabulary_of("byte_level")
    matcher = new_matcher("llguidance", "byte_level", json=INTEGERS, whitespace_pattern=" {1,40}")
    assert num_accepted(matcher, vocabulary, '{"a":', " ") == 40


@each_backend
@pytest.mark.parametrize("kind", ["object", "array"])
def test_objects_and_arrays_behind_references_may_have_anything_in_them(name, kind):
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/Any"}},
        "$defs": {"Any": {"type": kind}},
    }
    matcher, vocabulary = new_matcher(name, "byte_level", json=schema), vocabulary_of("byte_level")
    type_text(matcher, vocabulary, '{"a":{"b":[1]}}' if kind == "object" else '{"a":[{"b":1}]}')
    assert matcher.may_stop
