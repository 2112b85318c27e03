"""Streamed text equals the text of all tokens, cut before the first stop."""

from functools import cache
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.text_stream import IncrementalDetokenizer, StopChecker, TextStream
from router.tokenizer import Tokenizer
from tests.support.tokenizer_folders import (
    write_byte_fallback_folder,
    write_byte_level_folder,
    write_opt_folder,
)

WRITERS = {
    "byte_level": write_byte_level_folder,
    "byte_fallback": write_byte_fallback_folder,
    "opt": write_opt_folder,
}
kinds = pytest.mark.parametrize("kind", sorted(WRITERS))
thorough = settings(max_examples=250, deadline=None)

# Whole texts and, below, the bytes of incomplete or invalid characters.
TEXTS = [
    "hello",
    " the dog",
    "😀😃",
    "👩‍👩‍👧",
    "e\u0301",
    "日本",
    "\ufffd",
    "  ",
    "\n",
    "é",
    "𐍈 x",
    "▁",
]
CUT_BYTES = ["f0 9f 98", "e2 82", "c3", "80", "ff", "ed a0 80", "f4 90 80 80", "c0 af", "f0 9f 41"]


@cache
def load(kind: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(WRITERS[kind](Path(folder)))


@cache
def byte_ids(kind: str) -> list[int]:
    """The token id of each byte."""
    tokenizer = load(kind)
    if tokenizer.byte_token_ids:
        return sorted(tokenizer.byte_token_ids)
    by_text = {tokenizer._backend.id_to_token(i): i for i in range(tokenizer.vocab_size)}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [by_text[letters[byte]] for byte in range(256)]


@cache
def pieces(kind: str) -> st.SearchStrategy[list[int]]:
    tokenizer = load(kind)
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    cut = [[byte_ids(kind)[byte] for byte in bytes.fromhex(text)] for text in CUT_BYTES]
    anything = st.integers(0, tokenizer.vocab_size + 2).map(lambda token_id: [token_id])
    return st.one_of(st.sampled_from(encoded + cut), anything)


def token_lists(kind: str, max_pieces: int = 10) -> st.SearchStrategy[list[int]]:
    return st.lists(pieces(kind), max_size=max_pieces).map(lambda parts: [*chain(*parts)])


@st.composite
def chunked(draw, items):
    """Divides `items` anywhere into chunks, some of which may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=8)))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


def text_after(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """Returns the whole text without the prefix that it shares with the prompt's text."""
    before, after = tokenizer.decode(prompt), tokenizer.decode(prompt + output)
    num_shared = len(commonprefix([before, after]))  # noqa: RUF071 - characters are meant
    return after[num_shared:]


@kinds
@thorough
@given(data=st.data())
def test_pieces_join_to_the_whole_text(kind, data):
    tokenizer = load(kind)
    prompt = data.draw(token_lists(kind), "prompt")
    output = data.draw(token_lists(kind), "output")
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    streamed = "".join(detokenizer.push(chunk) for chunk in data.draw(chunked(output), "chunks"))
    assert streamed + detokenizer.flush() == text_after(tokenizer, prompt, output)
    assert detokenizer.flush() == ""


@kinds
@thorough
@given(data=st.data())
def test_emitted_text_is_final_and_lags_only_at_incomplete_characters(kind, data):
    tokenizer = load(kind)
    output = data.draw(token_lists(kind, max_pieces=6), "output")
    detokenizer, streamed = IncrementalDetokenizer(tokenizer, []), ""
    for num_tokens, token_id in enumerate(output, start=1):
        streamed += detokenizer.push([token_id])
        text = tokenizer.decode(output[:num_tokens])
        assert text.startswith(streamed)
        open_end = text.endswith("\ufffd") or token_id in tokenizer.byte_token_ids
        if tokenizer.has_text(token_id) and not open_end:
            assert streamed == text


@kinds
def test_a_character_in_pieces_is_emitted_whole(kind):
    tokenizer = load(kind)
    smiley = [byte_ids(kind)[byte] for byte in "😀".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert [detokenizer.push([token_id]) for token_id in smiley[:3]] == ["", "", ""]
    assert detokenizer.push(smiley[3:]) + detokenizer.flush() == "😀"


@kinds
def test_a_character_begun_by_the_prompt_is_completed(kind):
    tokenizer = load(kind)
    smiley = [byte_ids(kind)[byte] for byte in "😀".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, smiley[:2])
    assert detokenizer.push(smiley[2:]) + detokenizer.flush() == "😀"


@kinds
def test_a_run_of_byte_tokens_begun_by_the_prompt_is_continued(kind):
    tokenizer = load(kind)
    run = [byte_ids(kind)[byte] for byte in "日本語の文字".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, run[:9])
    assert detokenizer.push(run[9:]) + detokenizer.flush() == "の文字"


@kinds
def test_the_cost_per_token_does_not_grow(kind, monkeypatch):
    """The cost stays the same even for bytes that never become a character."""
    tokenizer = load(kind)
    num_decoded, decode = 0, Tokenizer.decode

    def counting_decode(self, token_ids, *args):
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(self, token_ids, *args)

    monkeypatch.setattr(Tokenizer, "decode", counting_decode)
    words = tokenizer.encode("hello the dog ", add_special_tokens=False)
    for output in ([byte_ids(kind)[0xFF]] * 2000, (words * 2000)[:2000]):
        detokenizer, num_decoded = IncrementalDetokenizer(tokenizer, words * 500), 0
        detokenizer.push(output)
        detokenizer.flush()
        assert num_decoded < 12 * len(output)


def naive_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Cuts before the stop that ends first; if several end there, before the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


few_letters = st.text("ab\n😀", max_size=20)
stop_lists = st.lists(st.text("ab\n😀", min_size=1, max_size=5), max_size=5)


@thorough
@given(text=few_letters, stops=stop_lists, data=st.data())
@example(text="abcd", stops=["bcd", "c"], data=None)
def test_stops_cut_like_a_search_of_the_whole_text(text, stops, data):
    emitted, matched, checker = "", None, StopChecker(stops)
    for chunk in data.draw(chunked(text)) if data else [text]:
        if matched is None:
            certain, matched = checker.push(chunk)
            emitted += certain
    assert (emitted + checker.flush(), matched) == naive_cut(text, stops)


@thorough
@given(text=few_letters, stops=stop_lists)
def test_only_a_possible_stop_is_held_back(text, stops):
    emitted, matched = StopChecker(stops).push(text)
    if matched is None:
        held = text[len(emitted) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = (text[i:] for i in range(len(emitted)))
        assert not any(stop.startswith(suffix) for suffix in longer for stop in stops)


def stops_in(text: str) -> st.SearchStrategy[list[str]]:
    """Stops that occur in `text`, begin at its end, or do not occur in it."""
    start, length = st.integers(0, len(text)), st.integers(1, 4)
    inside = st.builds(lambda start, length: text[start : start + length], start, length)
    return st.lists(st.one_of(inside.filter(bool), inside.map(lambda t: t + "#")), max_size=3)


@kinds
@thorough
@given(data=st.data())
def test_a_stream_is_the_text_cut_before_its_stop(kind, data):
    tokenizer = load(kind)
    prompt = data.draw(token_lists(kind, max_pieces=3), "prompt")
    output = data.draw(token_lists(kind), "output")
    text = text_after(tokenizer, prompt, output)
    stops = data.draw(stops_in(text), "stops")
    stream, streamed, matched, num_tokens = TextStream(tokenizer, prompt, stops), "", None, 0
    for chunk in data.draw(chunked(output), "chunks"):
        if matched is None:
            other, stream = stream, stream.fork()
            other.push(output)  # must not affect its fork
            piece = stream.push(chunk)
            streamed, matched = streamed + piece.text, piece.matched_stop
            num_tokens += piece.num_tokens
            assert matched is not None or piece.num_tokens == len(chunk)
    if matched is not None:
        again = TextStream(tokenizer, prompt, stops)
        assert again.push(output[: num_tokens - 1]).matched_stop is None
        assert again.push([output[num_tokens - 1]]).matched_stop == matched
    else:
        piece = stream.finish()
        streamed, matched = streamed + piece.text, piece.matched_stop
    assert (streamed, matched) == naive_cut(text, stops)
