"""`Tokenizer`: agreement with `transformers`, special tokens, unreadable files."""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from baton.common.errors import InvalidArgumentError
from router.fleet.served_model import RequestLimits
from router.requests.detokenizer import make_detokenizer
from router.requests.request import tokenize_prompt
from router.requests.tokenizer import Tokenizer
from tests.support.tokenizer_folders import (
    CORPUS,
    write_byte_fallback_folder,
    write_byte_level_folder,
    write_gpt2_folder,
    write_opt_folder,
    write_word_level_folder,
)

WRITERS = [
    write_byte_level_folder,
    write_byte_fallback_folder,
    write_opt_folder,
    write_gpt2_folder,
]
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "  leading and trailing  ",
    "hello",
    " hello</s>there<pad><unk> <s>",
    "a <tool ü> and an <image>b<|endoftext|>",
    "\x00\x01 control\r\n\ttabs",
    "don't 12345 we'll ... ",
    "مرحبا 🏳️‍🌈 \U0010ffff",
]


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.__name__.removeprefix("write_"))
def folder(request, tmp_path) -> Path:
    return request.param(tmp_path / "checkpoint")


def test_encode_equals_transformers(folder):
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected, text


async def test_truncated_texts_equal_those_of_transformers(folder):
    ours = Tokenizer.load(folder)
    theirs = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    limits = RequestLimits(10**6, 10**6, 10**6, 1)
    for text in filter(str.strip, TEXTS):
        for most in (theirs.num_special_tokens_to_add() + 1, 5, 10**4):
            expected = theirs(text, truncation=True, max_length=most).input_ids
            assert await tokenize_prompt(text, ours, limits, most) == tuple(expected), text


def test_decode_equals_transformers(folder):
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(ours.vocab_size) for _ in range(draw.randrange(12))]
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, ids


def streamed(tokenizer, ids, skip, spaces):
    detokenizer = make_detokenizer(
        tokenizer, [], skip_special_tokens=skip, spaces_between_special_tokens=spaces
    )
    return "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()


@pytest.mark.parametrize("writer", [*WRITERS, write_word_level_folder])
@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_equals_transformers(writer, skip, tmp_path):
    """For fast tokenizers `transformers` ignores `spaces_between_special_tokens`."""
    folder = writer(tmp_path)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    added = sorted(ours.added_tokens)
    has_spaces = writer is write_word_level_folder
    draw = random.Random(1)
    for _ in range(300):
        pool = draw.choice([added, range(ours.vocab_size)])
        ids = [draw.choice(pool) for _ in range(draw.randrange(12))]
        expected = theirs.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=False)
        assert streamed(ours, ids, skip, True) == expected, ids
        assert has_spaces or streamed(ours, ids, skip, False) == expected, ids


def test_spaces_between_added_tokens_are_left_out_on_request(tmp_path):
    tokenizer = Tokenizer.load(write_word_level_folder(tmp_path))
    ids = tokenizer.encode("dog <s> </s> <tool ü> dog <s> dog </s>", add_special_tokens=False)
    assert streamed(tokenizer, ids, False, True) == "dog <s> </s> <tool ü> dog <s> dog </s>"
    assert streamed(tokenizer, ids, False, False) == "dog <s></s><tool ü> dog <s> dog </s>"
    for spaces in (True, False):  # no special token is left
        assert streamed(tokenizer, ids, True, spaces) == "dog <tool ü> dog dog"


def test_decode_of_many_ids_equals_transformers(folder):
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode(" ".join(TEXTS) * 60)
    assert len(ids) > 4096
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_long_inputs_let_other_threads_run(tmp_path, name):
    tokenizer = Tokenizer.load(write_byte_fallback_folder(tmp_path))
    text = CORPUS[0] * 20_000
    argument = text if name == "encode" else tokenizer.encode(text)
    thread = threading.Thread(target=getattr(tokenizer, name), args=(argument,))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        num_turns += 1
        time.sleep(0.001)
    thread.join()
    assert num_turns > 5  # one or two if no other thread runs


def test_longest_token_chars_bounds_the_text_of_every_token(folder):
    tokenizer = Tokenizer.load(folder)
    longest = max(len(tokenizer.decode([i], False)) for i in range(tokenizer.vocab_size))
    assert longest <= tokenizer.longest_token_chars < 40


def test_text_survives_the_round_trip(folder):
    tokenizer = Tokenizer.load(folder)
    for text in ["hello", *CORPUS[:4]]:
        assert tokenizer.decode(tokenizer.encode(text)).lstrip() == text


def test_opt_texts_begin_with_the_end_token(tmp_path):
    tokenizer = Tokenizer.load(write_opt_folder(tmp_path))
    assert tokenizer.decode(tokenizer.encode("dog")[:1], skip_special_tokens=False) == "</s>"


def test_ids_beyond_the_vocabulary_have_no_text(folder):
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode([tokenizer.vocab_size, 2**32 - 1]) == ""
    assert not tokenizer.has_text(tokenizer.vocab_size)


def test_special_tokens_have_no_text(tmp_path):
    tokenizer = Tokenizer.load(write_byte_level_folder(tmp_path))
    padding = tokenizer.encode("<pad>", add_special_tokens=False)
    assert set(padding) < tokenizer.special_token_ids
    assert not tokenizer.has_text(padding[0])
    assert tokenizer.has_text(tokenizer.encode("dog")[-1])


def test_a_token_with_a_role_is_special_even_if_the_file_denies_it(tmp_path):
    write_byte_level_folder(tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in description["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    token_ids = theirs.encode("a </s>b<pad> <tool ü>")
    assert ours.encode("a </s>b<pad> <tool ü>") == token_ids
    assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)
    assert "</s>" not in ours.decode(token_ids)


def test_the_router_imports_neither_torch_nor_transformers():
    code = "import sys, router.requests.text_stream as _; "
    code += "print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert run.stdout.strip() == b"set()"


def test_a_lone_surrogate_is_refused(tmp_path):
    tokenizer = Tokenizer.load(write_byte_level_folder(tmp_path))
    with pytest.raises(InvalidArgumentError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_bad_words_are_encoded_at_the_start_and_after_a_space(tmp_path):
    tokenizer = Tokenizer.load(write_byte_level_folder(tmp_path))
    dog, spaced_dog = (tokenizer.encode(text, False) for text in ("dog", " dog"))
    assert len(spaced_dog) < len(dog)  # " dog" has a token of its own
    assert tokenizer.encode_bad_words(["dog", "  dog"]) == (tuple(dog),) * 2
    comma, spaced_comma = (tokenizer.encode(text, False) for text in ("(", " ("))
    assert len(comma) == 1 < len(spaced_comma)
    assert tokenizer.encode_bad_words(["("]) == (tuple(comma),)
    both = [
        word
        for word in (tokenizer.decode([i]).strip() for i in range(tokenizer.vocab_size))
        if word and reference_bad_words(tokenizer, [word])[1:]
    ]
    assert both
    assert tokenizer.encode_bad_words(both) == reference_bad_words(tokenizer, both)


def reference_bad_words(tokenizer, words):
    """The rule of vLLM's `SamplingParams.update_from_tokenizer`."""
    sequences = []
    for word in words:
        for has_space in (False, True):
            text = (" " if has_space else "") + word.lstrip()
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            bare = sequences[-1] if has_space else ()
            if not has_space or (ids[0] != bare[0] and len(ids) == len(bare)):
                sequences.append(ids)
    return tuple(sequences)


def test_bad_words_without_tokens_are_refused(folder):
    with pytest.raises(InvalidArgumentError, match=r"^bad_words is '  '; it must be a text that"):
        Tokenizer.load(folder).encode_bad_words(["dog", "  "])


def test_bad_words_are_encoded_in_one_call(folder, monkeypatch):
    tokenizer = Tokenizer.load(folder)
    backend = Mock(wraps=tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", backend)
    assert tokenizer.encode_bad_words(["dog", "the cat", "no"])
    assert backend.encode_batch_fast.call_count == 1
    assert tokenizer.encode_bad_words([]) == ()
    with pytest.raises(InvalidArgumentError, match=r"^bad_words is not valid Unicode: lone surr"):
        tokenizer.encode_bad_words(["fine", "a\ud800"])
