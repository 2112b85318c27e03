"""Forced text becomes the tokens that the tokenizer would have made of it."""

import pytest

from engine.constraints.retokenizer import Retokenizer
from engine.constraints.vocabulary import Vocabulary
from tests.support.constraints import BACKENDS, KINDS, new_matcher, tokenizer_of, vocabulary_of

each_backend = pytest.mark.parametrize("name", BACKENDS)
each_kind = pytest.mark.parametrize("kind", KINDS)


def retokenizer_of(kind):
    return Retokenizer(tokenizer_of(kind), vocabulary_of(kind))


def encode(kind, text):
    return retokenizer_of(kind)._tokenize(text.encode())


def text_of(kind, tokens):
    return b"".join(vocabulary_of(kind).tokens[i] for i in tokens).decode()


@each_backend
@each_kind
def test_text_that_ends_the_sequence_is_forced_whole(name, kind):
    matcher = new_matcher(name, kind, choice=['{"name": "Anna"}'])
    tokens = retokenizer_of(kind).forced_tokens(matcher, [])
    assert tokens == encode(kind, '{"name": "Anna"}')
    assert len(tokens) < len('{"name": "Anna"}')
    assert matcher.replay(tokens)


@each_backend
@each_kind
def test_tokens_that_may_grow_into_free_text_are_left_to_the_model(name, kind):
    matcher = new_matcher(name, kind, regex='\\{"name": "[a-z]+"\\}')
    tokens = retokenizer_of(kind).forced_tokens(matcher, [])
    for free in ("a", "anna", "bar", "value", "z"):
        whole = encode(kind, f'{{"name": "{free}"}}')
        assert whole[: len(tokens)] == tokens
    assert text_of(kind, tokens).startswith('{"name')


@each_backend
@each_kind
def test_forced_text_goes_on_from_the_tokens_before_it(name, kind):
    before = encode(kind, '{"name": "Anna", "')
    matcher = new_matcher(name, kind, choice=['{"name": "Anna", "age": 31}'])
    assert matcher.replay(before)
    tokens = retokenizer_of(kind).forced_tokens(matcher, [*encode(kind, "The quick "), *before])
    assert text_of(kind, tokens) == 'age": 31}'


@each_backend
@each_kind
def test_tokens_that_are_not_the_tokenizers_own_are_not_changed(name, kind):
    vocabulary = vocabulary_of(kind)
    brace = max(i for i, token in enumerate(vocabulary.tokens) if token == b"{")
    matcher = new_matcher(name, kind, choice=['{"name": 1}'])
    assert encode(kind, '{"name": 1}')[0] != brace, "the tokenizer has a longer token"
    assert matcher.accept(brace)
    tokens = retokenizer_of(kind).forced_tokens(matcher, [brace])
    assert text_of(kind, tokens) == '"name": 1}'


@each_backend
@each_kind
def test_a_special_token_separates_the_prompt(name, kind):
    (eos,) = vocabulary_of(kind).eos_token_ids
    matcher = new_matcher(name, kind, choice=["foo"])
    prompt = [*encode(kind, "a"), eos]
    assert retokenizer_of(kind).forced_tokens(matcher, prompt) == encode(kind, "foo")


@each_backend
@each_kind
def test_text_of_a_special_token_is_left_to_the_model(name, kind):
    matcher = new_matcher(name, kind, choice=["a</s>b"])
    tokens = retokenizer_of(kind).forced_tokens(matcher, [])
    assert text_of(kind, tokens) in ("", "a</s>b")


@each_backend
@each_kind
def test_characters_stay_whole(name, kind):
    matcher = new_matcher(name, kind, choice=["日本語 größe"])
    tokens = retokenizer_of(kind).forced_tokens(matcher, [])
    assert text_of(kind, tokens) == "日本語 größe"


@each_kind
def test_without_forced_text_there_are_no_forced_tokens(kind):
    matcher = new_matcher("xgrammar", kind, regex="[a-z]*")
    assert retokenizer_of(kind).forced_tokens(matcher, []) == []


@each_kind
def test_the_bytes_of_tokens_are_what_the_tokenizer_decodes(kind):
    backend, vocabulary = tokenizer_of(kind), vocabulary_of(kind)
    start = max(i for i, token in enumerate(vocabulary.tokens) if token == b"x")
    for token_id, token in enumerate(vocabulary.tokens):
        if token:  # after another token: decoders strip a space at the start of a text
            text = backend.decode([start, token_id], skip_special_tokens=True)
            assert text == (b"x" + token).decode(errors="replace"), (token_id, token)
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary
    assert set(vocabulary.special_tokens.values()) >= {"<s>", "</s>"}
    for token_id in vocabulary.special_tokens:
        assert vocabulary.tokens[token_id] == b""
