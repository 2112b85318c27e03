"""Tokenizers in GGUF files encode and decode like those that the files were made from."""

import random
from itertools import pairwise

import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from baton.common.errors import ConfigurationError
from baton.common.model_files.gguf import GgufFile
from baton.common.model_files.tokenizer_steps import byte_level_bytes, mark_duplicates
from engine.constraints.vocabulary import Vocabulary
from router.requests.tokenizer import Tokenizer
from tests.support.gguf_files import (
    BYTE,
    BYTE_TOKENIZER,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_metadata,
    write_gguf,
)

TEXTS = (
    "Hello, world! It's 12345 o'clock; I'D say: don't  panic...",
    "def f(x):\n\treturn x ** 2  # squares\r\n\r\n\n   end   ",
    "日本の首都はどこですか🗾 한국어 Ünïcödé ѲѪ",
    "cafe\u0301 ﬁ ① ½ ٣٤٥ ᾳ",
    "  leading, trailing  \n",
    "XMLHttpRequest HTTPServer iPhone ÀÉ éÈ",
    "$3.50 + <tag> == ~^|`{}[]\\",
    "",
    "the the the theory of everything and nothing 2024-01-31 1e-10",
    "<|im_start|>user\nhi <think> there<|im_end|>\n",
)
CORPUS = [*TEXTS, *(f"{a} {b} {a}{b} 1{b}" for a in TEXTS[:4] for b in TEXTS[4:8])] * 2
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}"
    "| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_LETTERS = (
    "\\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
DEEPSEEK_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def byte_level(*, use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


# The steps of the published tokenizer.json files.
PUBLISHED = {
    "gpt-2": [byte_level(use_regex=True)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)],
    "llama-bpe": [split(LLAMA3), byte_level(use_regex=False)],
    "qwen2": [split(QWEN2), byte_level(use_regex=False)],
    "tekken": [split(TEKKEN), byte_level(use_regex=False)],
    "olmo": [byte_level(use_regex=True)],
    "dbrx": [split(LLAMA3), byte_level(use_regex=False)],
    "gpt-4o": [split(GPT4O), byte_level(use_regex=False)],
    "deepseek-v3": [*map(split, DEEPSEEK3), byte_level(use_regex=False)],
    "deepseek-llm": [
        split("[\r\n]"),
        split(DEEPSEEK_LETTERS),
        split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        split("\\s+$"),
        split(DEEPSEEK_ASIAN),
        pre_tokenizers.Digits(individual_digits=True),
        byte_level(use_regex=False),
    ],
    "deepseek-coder": [
        split("[\r\n]"),
        split("\\s?\\p{L}+"),
        split("\\s?\\p{P}+"),
        split(DEEPSEEK_ASIAN),
        pre_tokenizers.Digits(individual_digits=True),
        byte_level(use_regex=False),
    ],
    "qwen35": [split(QWEN35), byte_level(use_regex=False)],
    "seed-coder": [split(SEED), byte_level(use_regex=False)],
    "kimi-k2": [split(KIMI), byte_level(use_regex=False)],
}


def published_tokenizer(rule):
    """A tokenizer with the rule, trained on the texts, with three added tokens."""
    model = models.BPE(ignore_merges=rule in ("llama-bpe", "tekken"))
    backend = tokenizers.Tokenizer(model)
    if rule in ("qwen2", "qwen35", "olmo"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[rule])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def loaded(tmp_path, metadata):
    path = tmp_path / "model.gguf"
    return GgufFile(write_gguf(path, {"general.architecture": "llama", **metadata}))


ADDED = (("<|im_start|>", True), ("<|im_end|>", True), ("<think>", False))


@pytest.mark.parametrize("rule", PUBLISHED)
def test_byte_level_tokenizers_are_the_published_ones(tmp_path, rule):
    expected = published_tokenizer(rule)
    metadata = tokenizer_metadata(expected, rule, ADDED, add_bos_token=False)
    found = loaded(tmp_path, metadata).load_tokenizer()
    assert found.get_vocab() == expected.get_vocab()
    shuffled = random.Random(1)
    mixed = ["".join(shuffled.choices("".join(TEXTS), k=40)) for _ in range(200)]
    for text in (*TEXTS, *mixed):
        ids = expected.encode(text).ids
        assert found.encode(text).ids == ids
        for skip in (True, False):
            decoded = found.decode(ids, skip_special_tokens=skip)
            assert decoded == expected.decode(ids, skip_special_tokens=skip)


def test_a_file_without_a_rule_splits_punctuation_and_digits_in_threes(tmp_path):
    metadata = tokenizer_metadata(published_tokenizer("gpt-2"), "default", ADDED)
    del metadata["tokenizer.ggml.pre"]
    tokenizer = loaded(tmp_path, metadata).load_tokenizer()
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a+b 12345, it's")]
    assert words == ["a", "+", "b", "Ġ", "123", "45", ",", "Ġit", "'", "s"]


@pytest.mark.parametrize(
    ("flags", "affixes"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, (["<|im_start|>"], [])),
        ({"add_eos_token": True}, ([], ["<|im_end|>"])),
        ({"add_bos_token": True, "add_eos_token": True}, (["<|im_start|>"], ["<|im_end|>"])),
        ({"pre": "llama-bpe"}, (["<|im_start|>"], [])),
        ({"pre": "llama3", "add_bos_token": False}, ([], [])),
    ],
)
def test_a_text_begins_and_ends_with_the_tokens_that_flags_name(tmp_path, flags, affixes):
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    metadata = tokenizer_metadata(published_tokenizer("gpt-2"), "gpt-2", ADDED, **ids)
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    tokenizer = loaded(tmp_path, metadata).load_tokenizer()
    first, last = affixes
    assert tokenizer.encode("a").tokens == [*first, "a", *last]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def test_unused_tokens_that_fill_up_the_vocabulary_are_left_out(tmp_path):
    metadata = dict(BYTE_TOKENIZER)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "[PAD259]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], UNUSED]
    tokenizer = loaded(tmp_path, metadata).load_tokenizer()
    assert tokenizer.get_vocab_size() == 259
    assert tokenizer.decode([104, 259, 105]) == "hi".translate({104: "h", 105: "i"})


# SentencePiece's kind: a vocabulary of pieces with scores.
PIECES = {
    "▁": -3.0, "t": -4.0, "h": -4.5, "e": -5.0, "a": -6.0, "n": -6.5, "d": -7.0, "r": -7.5,
    "▁t": -1.0, "he": -1.5, "▁the": -0.5, "th": -2.0, "an": -2.5, "and": -2.2, "▁and": -0.7,
    "er": -1.2, "ther": -0.9, "nd": -3.1, "re": -1.1, "▁▁": -0.1, "日": -8.0,
}  # fmt: skip
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECE_TOKENS = [*SPECIAL, *BYTES, *PIECES, "[INST]"]


def sentencepiece_metadata(**changes):
    scores = [0.0] * 259 + list(PIECES.values()) + [0.0]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES) + [USER_DEFINED]
    keys = {"model": "llama", "tokens": PIECE_TOKENS, "scores": scores, "token_type": types}
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()}


def encode_by_scores(text):
    """SentencePiece's BPE: joins the two neighbours with the best score, the leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(PIECES.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
        best = max(((score, i) for score, i in joined if score is not None), default=None)
        if best is None:
            break
        place = -best[1]
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    tokens = []
    for part in parts:
        tokens += [part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()]
    return tokens


def test_pieces_are_built_in_the_order_of_their_scores(tmp_path):
    tokenizer = loaded(tmp_path, sentencepiece_metadata()).load_tokenizer()
    rng = random.Random(2)
    for _ in range(500):
        text = "".join(rng.choices("theandr 日ü", k=rng.randint(1, 25)))
        found = tokenizer.encode(text)
        assert found.tokens == ["<s>", *encode_by_scores(text)]
        assert tokenizer.decode(found.ids) == text


def test_pieces_are_built_without_a_space_prefix_if_the_file_says_so(tmp_path):
    metadata = sentencepiece_metadata(add_space_prefix=False, add_bos_token=False)
    tokenizer = loaded(tmp_path, metadata).load_tokenizer()
    assert tokenizer.encode("the and").tokens == ["t", "he", "▁and"]
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"
    # A space prefix begins each part of a text between special tokens, as in llama.cpp.
    prefixed = loaded(tmp_path, sentencepiece_metadata(add_bos_token=False)).load_tokenizer()
    assert prefixed.encode("the[INST]the").tokens == ["▁the", "[INST]", "▁the"]


def test_pieces_that_are_too_long_to_merge_are_refused_by_name(tmp_path):
    def metadata(num_chars):
        tokens = [*PIECE_TOKENS[:-2], "a" * num_chars, PIECE_TOKENS[-1]]
        return sentencepiece_metadata(tokens=tokens)

    assert loaded(tmp_path, metadata(1024)).load_tokenizer()
    with pytest.raises(ConfigurationError, match=r"tokens has 'a+'\.\.\. of 1025 characters"):
        loaded(tmp_path, metadata(1025)).load_tokenizer()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported are gpt2"),
        ({"pre": "afmoe"}, "tokenizer.ggml.pre 'afmoe' is not supported; supported are"),
        ({"tokens": None}, "it has no tokenizer.ggml.tokens"),
        ({"merges": None}, "it has no tokenizer.ggml.merges"),
        ({"merges": ["a b"]}, "tokenizer.ggml.merges has 'a b'"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges has 'a b c'"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries for 259 tokens"),
        ({"model": "llama"}, "it has no tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.5]}, "scores has 1 entries for 259 tokens"),
        ({"add_bos_token": True, "bos_token_id": 999}, "add_bos_token and no such token"),
        ({"merges": [1, 2]}, "its metadata is malformed"),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_refused_by_name(tmp_path, changes, reason):
    metadata = BYTE_TOKENIZER | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ConfigurationError, match=reason):
        loaded(tmp_path, metadata).load_tokenizer()


@pytest.mark.parametrize(
    ("rule", "tokens"), [("llama-bpe", ["xyz"]), ("tekken", ["xyz"]), ("qwen2", ["x", "y", "z"])]
)
def test_some_rules_take_a_word_that_no_merge_builds(tmp_path, rule, tokens):
    metadata = dict(BYTE_TOKENIZER) | {"tokenizer.ggml.pre": rule}
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "xyz"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], NORMAL]
    tokenizer = loaded(tmp_path, metadata).load_tokenizer()
    assert tokenizer.encode("xyz", add_special_tokens=False).tokens == tokens


# Vocabularies that have a text twice.


def with_tokens(metadata, *added):
    """The keys of a tokenizer with further tokens, given as (text, type)."""
    changed = dict(metadata)
    for key, values in (
        ("tokens", [text for text, _ in added]),
        ("token_type", [t for _, t in added]),
    ):
        changed[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *values]
    if "tokenizer.ggml.scores" in metadata:
        scores = [-9.0] * len(added)
        changed["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], *scores]
    return changed


def loaded_tokenizer(tmp_path, metadata):
    return Tokenizer(loaded(tmp_path, metadata).load_tokenizer())


@pytest.mark.parametrize(
    ("metadata", "token", "text"),
    [
        (BYTE_TOKENIZER, "a", "a"),
        (BYTE_TOKENIZER, "\u0120t", " t"),
        (BYTE_TOKENIZER, "\u0120", " "),
        (sentencepiece_metadata(), "the", "the"),
        (sentencepiece_metadata(), "and", "and"),
        (sentencepiece_metadata(), "\u65e5", "\u65e5"),
        (sentencepiece_metadata(), "<0x41>", "A"),
        (sentencepiece_metadata(), "[INST]", "[INST]"),
    ],
)
def test_all_ids_of_a_text_decode_to_it(tmp_path, metadata, token, text):
    kind = BYTE if token.startswith("<0x") else USER_DEFINED if token == "[INST]" else NORMAL
    size = len(metadata["tokenizer.ggml.tokens"])
    twice = with_tokens(metadata, (token, kind), (token, kind))
    tokenizer = loaded_tokenizer(tmp_path, twice)
    ids = [i for i, known in enumerate(twice["tokenizer.ggml.tokens"]) if known == token]
    assert ids[-2:] == [size, size + 1]
    assert tokenizer.vocab_size == size + 2
    around = tokenizer.encode("nd", add_special_tokens=False)  # a first space is left out
    for token_id in ids:
        assert tokenizer.decode([*around, token_id, token_id]) == f"nd{text}{text}"
        assert tokenizer.token(token_id) == token
        assert tokenizer.has_text(token_id)
        assert tokenizer.byte_token_ids.get(token_id) == (0x41 if kind == BYTE else None)
    vocabulary = Vocabulary.of(tokenizer._backend, vocab_size=size + 2, eos_token_ids=[1])
    assert {vocabulary.tokens[token_id] for token_id in ids} == {text.encode()}


def test_texts_are_encoded_with_the_last_of_equal_tokens(tmp_path):
    tokenizer = loaded_tokenizer(tmp_path, with_tokens(BYTE_TOKENIZER, ("\u0120t", NORMAL)))
    assert tokenizer.encode("a t", add_special_tokens=False) == [97, 259]
    mixed = "".join(random.Random(3).choices("".join(TEXTS), k=200)) + "\ufdd0 t\ufdd0"
    assert tokenizer.decode(tokenizer.encode(mixed)) == mixed


def test_a_special_token_keeps_its_text_and_stays_special(tmp_path):
    metadata = with_tokens(
        BYTE_TOKENIZER, ("<x>", CONTROL), ("<x>", NORMAL), ("<eos>", CONTROL), ("", NORMAL)
    )
    tokenizer = loaded_tokenizer(tmp_path, with_tokens(metadata, ("", NORMAL)))
    assert tokenizer.encode("a<x>", add_special_tokens=False)[-1] == 259
    assert tokenizer.decode([97, 259, 257, 261], skip_special_tokens=True) == "a"
    assert tokenizer.decode([97, 259, 257, 261], skip_special_tokens=False) == "a<x><eos><eos>"
    assert tokenizer.decode([97, 260]) == "a<x>"
    assert {257, 259, 261} <= tokenizer.special_token_ids
    assert tokenizer.added_tokens[257] == tokenizer.added_tokens[261] == "<eos>"
    assert [tokenizer.has_text(token_id) for token_id in (260, 261, 262, 263)] == [True] + [
        False
    ] * 3


def test_a_vocabulary_without_duplicates_has_no_marks():
    assert mark_duplicates(["a", "b"], ()) == ["a", "b"]
    assert mark_duplicates(["a", "b", "a", "a"], {2}) == ["a\ufdd0\ufdd0", "b", "a", "a\ufdd0"]


@pytest.mark.parametrize("text", ["é€", "日本 é", "<think>"])
def test_an_added_token_of_a_byte_level_vocabulary_is_its_own_text(text: str) -> None:
    """Some letters of these tokens would stand for bytes in other tokens."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, normalized=False)])
    assert byte_level_bytes(text).decode() == backend.decode([1]) == text
