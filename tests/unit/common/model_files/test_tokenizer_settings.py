"""Entries of tokenizer_config.json mean what they mean to `AutoTokenizer`."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from baton.common.errors import ConfigurationError
from baton.common.model_files.files import CheckpointFolder
from baton.common.model_files.tokenizer_settings import read_settings
from router.chat.template_source import find_templates
from router.requests.tokenizer import Tokenizer as RouterTokenizer
from tests.support.tokenizer_folders import (
    write_byte_fallback_folder,
    write_byte_level_folder,
    write_opt_folder,
)

TEXTS = [
    "def hello",
    " hello  world",
    "a  </s>  b<s>c</s>d",
    "x <tool ü> y  <x1>  z<x1>",
    "é 日本 <pad>A<|endoftext|>b",
    "",
    " ",
]
GPT2, QWEN2, LLAMA = "GPT2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizerFast"
PLAIN = "PreTrainedTokenizerFast"
WRITERS = {
    "byte_level": write_byte_level_folder,
    "byte_fallback": write_byte_fallback_folder,
    "opt": write_opt_folder,
}


def token(text, **flags):
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": text, **dict.fromkeys(names, False), **flags}


def change(folder, changes, model_type=None):
    """Changes entries of tokenizer_config.json, and removes those that are ...; writes the model's
    type to config.json.
    """
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | changes
    settings = {name: value for name, value in settings.items() if value is not ...}
    file.write_text(json.dumps(settings))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def check_agreement(folder):
    """Asserts that texts and ids are those of `AutoTokenizer`."""
    ours, theirs = RouterTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    assert CheckpointFolder(folder).eos_token_id() == theirs.eos_token_id
    for text in TEXTS:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == expected, text
        for skip in (True, False):
            decoded = theirs.decode(expected, skip_special_tokens=skip)
            assert ours.decode(expected, skip) == decoded, text


@pytest.mark.parametrize(
    ("kind", "name", "model_type"),
    [
        ("byte_level", GPT2, None),
        ("byte_level", GPT2, "llama"),
        ("byte_level", ..., "gpt2"),
        ("byte_level", ..., "opt"),
        ("byte_level", ..., "llama"),
        ("byte_level", PLAIN, "gpt2"),
        ("byte_level", LLAMA, None),
        ("byte_level", LLAMA, "llama"),
        ("byte_fallback", PLAIN, None),
        ("byte_fallback", LLAMA, None),
        ("byte_fallback", LLAMA, "llama"),
        ("byte_fallback", LLAMA, "mistral"),
        ("byte_fallback", ..., "llama"),
        ("opt", GPT2, None),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_prefix_space": True},
        {"add_prefix_space": False},
        {"split_special_tokens": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"bos_token": ..., "eos_token": ..., "unk_token": ..., "pad_token": ...},
        {"legacy": True},
        {"legacy": None, "do_lower_case": True, "clean_up_tokenization_spaces": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_entries_of_a_class_are_those_of_transformers(tmp_path, kind, name, model_type, changes):
    folder = WRITERS[kind](tmp_path)
    change(folder, {"tokenizer_class": name, **changes}, model_type)
    check_agreement(folder)


@pytest.mark.parametrize("name", [QWEN2, PLAIN, GPT2])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_qwen2_model_has_its_own_class_whatever_it_states(tmp_path, name, has_prefix):
    folder = write_byte_level_folder(tmp_path)
    change(folder, {"tokenizer_class": name, "add_prefix_space": has_prefix}, "qwen2")
    ours, theirs = RouterTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("def hello") == theirs.encode("def hello")
    assert read_settings(folder)["tokenizer_class"] == "Qwen2Tokenizer"


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"added_tokens_decoder": {"1": token("</s>", **{flag: True}), "419": token("<tool ü>")}}
            for flag in ("special", "lstrip", "rstrip", "single_word", "normalized")
        ),
        {"added_tokens_decoder": {"419": token("<tool ü>", special=True, rstrip=True)}},
        {"added_tokens_decoder": {"430": token("<x1>", lstrip=True)}},
        {"additional_special_tokens": ["<x1>", "def", "<tool ü>"]},
        {"extra_special_tokens": ["<x1>"], "additional_special_tokens": ["def"]},
        {"extra_special_tokens": [], "additional_special_tokens": ["def"]},
        {"extra_special_tokens": {"image_token": "<x1>", "tool_token": "<tool ü>"}},
        {"image_token": "<x1>", "extra_special_tokens": ["hello"]},
        {"tool_token": "<tool ü>"},
        {"sep_token": "<tool ü>", "mask_token": "<x1>"},
        {"bos_token": None, "eos_token": None, "pad_token": None},
    ],
)
def test_added_tokens_are_those_of_transformers(tmp_path, changes):
    folder = write_byte_level_folder(tmp_path)
    change(folder, {"tokenizer_class": PLAIN, **changes})
    check_agreement(folder)


@pytest.mark.parametrize("name", [PLAIN, GPT2])
def test_older_files_describe_added_tokens(tmp_path, name):
    folder = write_byte_level_folder(tmp_path)
    change(folder, {"tokenizer_class": name, "extra_special_tokens": ["<x1>"]})
    (folder / "added_tokens.json").write_text(json.dumps({"<x1>": 420, "hello": 421}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "hello"}))
    check_agreement(folder)


def test_an_older_llama_file_begins_the_first_word_alone_with_a_space(tmp_path):
    """Its normalizer writes a space after each special token, that of the class does not."""
    folder = write_byte_fallback_folder(tmp_path)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = None
    backend.save(str(folder / "tokenizer.json"))
    for changes in ({}, {"legacy": True}, {"add_prefix_space": False}):
        change(folder, {"tokenizer_class": LLAMA, **changes})
        check_agreement(folder)


def test_other_steps_of_the_file_stay(tmp_path):
    """`transformers` 5 replaces them by those of the class, which are not what models learned."""
    folder = write_byte_level_folder(tmp_path)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    backend.add_tokens([AddedToken("<x1>", normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    change(folder, {"tokenizer_class": GPT2, "add_prefix_space": False})
    loaded = RouterTokenizer.load(folder)
    assert loaded.encode("12 <x1>") == backend.encode("12 <x1>").ids


def test_a_file_that_asks_for_a_space_is_overruled_by_the_class(tmp_path):
    folder = write_byte_level_folder(tmp_path)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.save(str(folder / "tokenizer.json"))
    for name in (GPT2, PLAIN):
        change(folder, {"tokenizer_class": name})
        check_agreement(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"eos_token": 5}, "eos_token is 5; it must be a text or an object"),
        ({"pad_token": []}, r"pad_token is \[\]; it must be a text"),
        ({"unk_token": {"content": None}}, "unk_token is {'content': None}"),
        ({"extra_special_tokens": "<x1>"}, "extra_special_tokens is '<x1>'; it must be a list"),
        ({"extra_special_tokens": [7]}, "extra_special_tokens is 7; it must be a text"),
        ({"extra_special_tokens": {"a": 7}}, "extra_special_tokens, a is 7; it must be a text"),
        ({"additional_special_tokens": [None]}, "additional_special_tokens is None"),
        ({"added_tokens_decoder": []}, r"added_tokens_decoder is \[\]; it must be an object"),
        ({"added_tokens_decoder": {"3": None}}, "added_tokens_decoder, 3 is None"),
        (
            {"added_tokens_decoder": {"3": {"content": "<x>", "lstrip": "yes"}}},
            "added_tokens_decoder, 3 is .* not an instance of 'bool'",
        ),
        ({"eos_token": {"content": "<x>", "rstrip": None}}, "eos_token is .* not an instance of"),
        ({"added_tokens_decoder": {"x": "<x1>"}}, r"added_tokens_decoder has the ids \['x'\]"),
    ],
)
def test_a_malformed_entry_is_named(tmp_path, changes, reason):
    folder = write_byte_level_folder(tmp_path)
    change(folder, changes)
    with pytest.raises(ConfigurationError, match=f"cannot read the tokenizer in .*: {reason}"):
        RouterTokenizer.load(folder)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '"\\ud800'])
@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "config.json"]
)
def test_a_file_that_is_not_json_is_named(tmp_path, name, content):
    folder = write_byte_level_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / name).write_text(content)
    with pytest.raises(ConfigurationError, match=rf"{name} is not readable JSON"):
        RouterTokenizer.load(folder)
    with pytest.raises(ConfigurationError, match=rf"{name} is not readable JSON"):
        find_templates(str(folder))
