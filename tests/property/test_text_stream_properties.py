"""Streamed text equals the text of all tokens, cut before the first stop."""

from functools import cache
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from router.requests.detokenizer import WindowDetokenizer, make_detokenizer
from router.requests.text_stream import StopChecker, TextStream
from router.requests.tokenizer import Tokenizer
from tests.support.tokenizer_folders import (
    write_byte_fallback_folder,
    write_byte_level_folder,
    write_opt_folder,
)

pytestmark = pytest.mark.sampled(one_in=2)

WRITERS = {
    "byte_level": write_byte_level_folder,
    "byte_fallback": write_byte_fallback_folder,
    "opt": write_opt_folder,
}
kinds = pytest.mark.parametrize("kind", sorted(WRITERS))
skips = pytest.mark.parametrize("skip", [True, False], ids=["skip_special", "keep_special"])
thorough = settings(max_examples=100, deadline=None)

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


def text_after(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True
) -> str:
    """Returns the whole text without the prefix that it shares with the prompt's text."""
    before, after = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + output, skip)
    num_shared = len(commonprefix([before, after]))  # noqa: RUF071 - characters are meant
    return after[num_shared:]


@kinds
@skips
@thorough
@given(data=st.data())
def test_pieces_join_to_the_whole_text(kind, skip, data):
    tokenizer = load(kind)
    prompt = data.draw(token_lists(kind), "prompt")
    output = data.draw(token_lists(kind), "output")
    detokenizer = make_detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    streamed = "".join(detokenizer.push(chunk) for chunk in data.draw(chunked(output), "chunks"))
    assert streamed + detokenizer.flush() == text_after(tokenizer, prompt, output, skip)
    assert detokenizer.flush() == ""


@kinds
@thorough
@given(data=st.data())
def test_emitted_text_is_final_and_lags_only_at_incomplete_characters(kind, data):
    tokenizer = load(kind)
    output = data.draw(token_lists(kind, max_pieces=6), "output")
    detokenizer, streamed = make_detokenizer(tokenizer, []), ""
    for num_tokens, token_id in enumerate(output, start=1):
        streamed += detokenizer.push([token_id])
        text = tokenizer.decode(output[:num_tokens])
        assert text.startswith(streamed)
        open_end = text.endswith("\ufffd") or token_id in tokenizer.byte_token_ids
        if tokenizer.has_text(token_id) and not open_end:
            assert streamed == text


@pytest.mark.parametrize("kind", ["byte_level", "opt"])
@skips
@thorough
@given(data=st.data())
def test_both_detokenizers_write_the_same_text_of_bytes(kind, skip, data):
    """GGUF files with a text under several ids are byte-level and decoded window by window."""
    tokenizer = load(kind)
    prompt = data.draw(token_lists(kind), "prompt")
    output = data.draw(token_lists(kind), "output")
    assert tokenizer.is_byte_level
    streamed = make_detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    window = WindowDetokenizer(tokenizer, prompt, skip, True)
    assert streamed.push(output) + streamed.flush() == window.push(output) + window.flush()


@kinds
def test_a_character_in_pieces_is_emitted_whole(kind):
    tokenizer = load(kind)
    smiley = [byte_ids(kind)[byte] for byte in "😀".encode()]
    detokenizer = make_detokenizer(tokenizer, [])
    assert [detokenizer.push([token_id]) for token_id in smiley[:3]] == ["", "", ""]
    assert detokenizer.push(smiley[3:]) + detokenizer.flush() == "😀"


@kinds
def test_a_character_begun_by_the_prompt_is_completed(kind):
    tokenizer = load(kind)
    smiley = [byte_ids(kind)[byte] for byte in "😀".encode()]
    detokenizer = make_detokenizer(tokenizer, smiley[:2])
    assert detokenizer.push(smiley[2:]) + detokenizer.flush() == "😀"


@kinds
def test_a_run_of_byte_tokens_begun_by_the_prompt_is_continued(kind):
    tokenizer = load(kind)
    run = [byte_ids(kind)[byte] for byte in "日本語の文字".encode()]
    detokenizer = make_detokenizer(tokenizer, run[:9])
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
        detokenizer, num_decoded = make_detokenizer(tokenizer, words * 500), 0
        detokenizer.push(output)
        detokenizer.flush()
        assert num_decoded < 12 * len(output)


def naive_cut(
    text: str, stops: list[str], start: int = 0, *, keep: bool = False
) -> tuple[str, str | None]:
    """Cuts at the stop that ends first after `start`; if several end there, at the longest."""
    found = []
    for stop in stops:
        begin = text.find(stop, max(0, start + 1 - len(stop)))
        if begin >= 0:
            found.append((begin + len(stop), -len(stop), stop))
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if keep else end - len(stop)], stop


few_letters = st.text("ab\n😀", max_size=20)
stop_lists = st.lists(st.text("ab\n😀", min_size=1, max_size=5), max_size=5)


@thorough
@given(text=few_letters, stops=stop_lists, keep=st.booleans(), data=st.data())
@example(text="abcd", stops=["bcd", "c"], keep=False, data=None)
def test_stops_cut_like_a_search_of_the_whole_text(text, stops, keep, data):
    emitted, matched, checker = "", None, StopChecker(stops, keep_stop=keep)
    for chunk in data.draw(chunked(text)) if data else [text]:
        if matched is None:
            certain, matched = checker.push(chunk)
            emitted += certain
    assert (emitted + checker.flush(), matched) == naive_cut(text, stops, keep=keep)


@given(before=few_letters, after=few_letters, stops=stop_lists)
@example(before="a", after="b", stops=["ab"])
@example(before="ab", after="b", stops=["ab"])
def test_a_stop_may_begin_in_text_that_is_not_searched_and_not_end_there(before, after, stops):
    checker = StopChecker(stops)
    emitted, matched = checker.push(before, may_stop=False)
    assert matched is None
    certain, matched = checker.push(after)
    expected = naive_cut(before + after, stops, len(before))
    assert (emitted + certain + checker.flush(), matched) == expected


@thorough
@given(text=few_letters, stops=stop_lists)
def test_nothing_is_held_back_for_a_stop_that_is_kept(text, stops):
    emitted, _ = StopChecker(stops, keep_stop=True).push(text)
    assert emitted == naive_cut(text, stops, keep=True)[0]


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


def stream_of(tokenizer: Tokenizer, prompt: list[int], **params) -> TextStream:
    sampling_params = SamplingParams(max_tokens=1000, **params)
    spec = RequestSpec.with_defaults("r", tuple(prompt), sampling_params, eos_token_ids=())
    return TextStream(tokenizer, spec)


@kinds
@skips
@thorough
@given(data=st.data())
def test_a_stream_is_the_text_cut_at_its_stop(kind, skip, data):
    tokenizer = load(kind)
    prompt = data.draw(token_lists(kind, max_pieces=3), "prompt")
    output = data.draw(token_lists(kind), "output")
    text = text_after(tokenizer, prompt, output, skip)
    keep = data.draw(st.booleans(), "keep")
    params = {
        "stop": data.draw(stops_in(text), "stops"),
        "min_tokens": data.draw(st.integers(0, len(output)), "min_tokens"),
        "include_stop_str_in_output": keep,
        "skip_special_tokens": skip,
    }
    stream, streamed, matched, num_tokens = stream_of(tokenizer, prompt, **params), "", None, 0
    for chunk in data.draw(chunked(output), "chunks"):
        if matched is None:
            other, stream = stream, stream.fork()
            other.push(output)  # must not affect its fork
            piece = stream.push(chunk)
            streamed, matched = streamed + piece.text, piece.matched_stop
            num_tokens += piece.num_tokens
            assert matched is not None or piece.num_tokens == len(chunk)
    if matched is not None:
        assert num_tokens > params["min_tokens"]
        again = stream_of(tokenizer, prompt, **params)
        assert again.push(output[: num_tokens - 1]).matched_stop is None
        assert again.push([output[num_tokens - 1]]).matched_stop == matched
    else:
        piece = stream.finish()
        streamed, matched = streamed + piece.text, piece.matched_stop
    unsearched = make_detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    start = len(unsearched.push(output[: params["min_tokens"]]))
    if len(output) <= params["min_tokens"]:
        start = len(text)
    assert (streamed, matched) == naive_cut(text, params["stop"], start, keep=keep)


@kinds
def test_the_text_of_a_stop_token_is_left_out_unless_it_is_asked_for(kind):
    tokenizer = load(kind)
    output = tokenizer.encode("the dog", add_special_tokens=False)
    stop = output[-1]
    assert stop not in output[:-1]
    for keep, tokens in ((False, output[:-1]), (True, output)):
        stream = stream_of(tokenizer, [], stop_token_ids=[stop], include_stop_str_in_output=keep)
        piece = stream.push(output)
        assert piece.num_tokens == len(output)
        assert piece.text + stream.finish().text == tokenizer.decode(tokens)


def test_without_detokenization_nothing_is_decoded(monkeypatch):
    tokenizer = load("byte_level")
    monkeypatch.setattr(Tokenizer, "decode", None)
    monkeypatch.setattr(Tokenizer, "has_text", None)
    monkeypatch.setattr(Tokenizer, "bytes_of", None)
    stream = stream_of(tokenizer, [1, 2, 3], detokenize=False).fork()
    assert stream.push([4, 5, 6]) == ("", None, 3)
    assert stream.finish() == ("", None, 0)


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u65e5", "\U0001f600"])
def test_a_long_prompt_of_bytes_is_not_decoded_again_as_a_whole(character: str) -> None:
    tokenizer, ids = load("byte_fallback"), byte_ids("byte_fallback")
    prompt = [ids[byte] for byte in (character * 3000).encode()]
    tokens = [ids[byte] for byte in f"x{character}y".encode()]
    stream = WindowDetokenizer(tokenizer, prompt, True, True)
    assert len(stream._context) <= 256 + 4
    assert stream.push(tokens) + stream.flush() == f"x{character}y"
    assert text_after(tokenizer, prompt, tokens) == f"x{character}y"
