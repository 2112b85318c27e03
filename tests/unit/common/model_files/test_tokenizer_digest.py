"""`vocabulary_digest`: equal for the same vocabulary in other files, different for another."""

import json

import pytest

from baton.common.model_files.tokenizer_files import load_tokenizer, vocabulary_digest
from tests.support.tokenizer_folders import (
    write_byte_fallback_folder,
    write_byte_level_folder,
    write_gpt2_folder,
    write_opt_folder,
    write_word_level_folder,
)

WRITERS = [
    write_byte_fallback_folder,
    write_byte_level_folder,
    write_gpt2_folder,
    write_opt_folder,
    write_word_level_folder,
]


def make(parent, writer):
    folder = parent / writer.__name__
    folder.mkdir(parents=True, exist_ok=True)
    return writer(folder)


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path, write_byte_level_folder)


def rewrite(file, change):
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content, indent=4), encoding="utf-8")


def test_each_tokenizer_has_its_own_digest(tmp_path):
    folders = [make(tmp_path, writer) for writer in WRITERS]
    assert all(vocabulary_digest(folder) for folder in folders)
    vocabularies = {
        json.dumps(sorted(load_tokenizer(folder).get_vocab(with_added_tokens=False).items()))
        for folder in folders
    }
    assert len({vocabulary_digest(folder) for folder in folders}) == len(vocabularies) > 1


def test_white_space_padding_and_added_tokens_do_not_change_it(folder):
    before = vocabulary_digest(folder)

    def change(content):
        content["padding"] = content["truncation"] = None
        content["added_tokens"] = content["added_tokens"][:-1]
        vocab = content["model"]["vocab"]
        content["model"]["vocab"] = dict(reversed(vocab.items()))

    rewrite(folder / "tokenizer.json", change)
    (folder / "tokenizer_config.json").write_text("{}")
    assert vocabulary_digest(folder) == before


def test_two_exchanged_tokens_change_it(folder):
    before = vocabulary_digest(folder)

    def change(content):
        vocab = content["model"]["vocab"]
        first, second = list(vocab)[:2]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    rewrite(folder / "tokenizer.json", change)
    assert vocabulary_digest(folder) != before


def test_old_files_and_tokenizer_json_of_the_same_vocabulary_have_the_same_digest(tmp_path):
    folder = make(tmp_path, write_gpt2_folder)
    new = tmp_path / "new"
    new.mkdir()
    load_tokenizer(folder).save(str(new / "tokenizer.json"))
    assert not (folder / "tokenizer.json").exists()
    assert vocabulary_digest(new) == vocabulary_digest(folder) != ""


def test_a_vocabulary_with_scores_is_digested(tmp_path):
    model = {"vocab": [["a", -1.0], ["b", -2.0]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    digest = vocabulary_digest(tmp_path)
    model["vocab"].reverse()
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert digest != vocabulary_digest(tmp_path) != ""


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"model": {"vocab": 3}}'])
def test_a_folder_without_a_readable_tokenizer_has_none(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert vocabulary_digest(tmp_path) == ""
