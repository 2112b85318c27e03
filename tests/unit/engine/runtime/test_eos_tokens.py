"""The end-of-sequence ids of a checkpoint: those of its files and of its tokenizer."""

import json
import logging

import pytest

from baton.common.errors import ConfigurationError
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.runtime.weights.described_model import read_eos_token_ids
from tests.support.tokenizer_folders import write_byte_level_folder

VOCAB_SIZE = 300
TOKENIZERS_OWN = 1  # of "</s>"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder without weights and without a tokenizer."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def write(folder, name, **fields):
    (folder / name).write_text(json.dumps(fields))


def read(folder, vocab_size=VOCAB_SIZE):
    return read_eos_token_ids(open_checkpoint(str(folder), with_weights=False), vocab_size)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (2, (2,)),
        ([2, 7, 2], (2, 7)),
        ([], ()),
        (-1, ()),
        ([2, 128009], (2,)),
        ([299, 300], (299,)),
        ([2**31, 2**63, 2**64, -(2**63), 5], (5,)),
        (2.0, (2,)),
        (1e300, ()),
    ],
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_ids_that_no_row_of_the_logits_has_are_left_out(folder, name, stated, expected):
    write(folder, name, eos_token_id=stated)
    assert read(folder) == expected


@pytest.mark.parametrize(
    "stated", ["2", True, 2.5, [2, None], [[2]], [2, "</s>"], {"id": 2}, float("nan"), [[]], ""]
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_entry_that_has_no_ids_is_refused_by_the_name_of_its_file(folder, name, stated):
    write(folder, name, eos_token_id=stated)
    with pytest.raises(ConfigurationError, match=rf"/{name}: eos_token_id is .*; it must be an"):
        read(folder)


@pytest.mark.parametrize(
    ("content", "reason"), [("[" * 100_000, "recursion"), ("[]", "object"), ("{", "Expecting")]
)
def test_a_file_that_cannot_be_read_is_named(folder, content, reason):
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=rf"/generation_config\.json .*{reason}"):
        read(folder)


def test_what_is_left_out_is_logged(folder, caplog):
    write(folder, "config.json", eos_token_id=[2, -1, 128009])
    with caplog.at_level(logging.WARNING, logger="baton.engine"):
        read(folder)
    (message,) = caplog.messages
    assert "eos_token_id -1, 128009 is left out; the model has the tokens 0 to 299" in message


def test_the_first_file_with_an_entry_counts(folder):
    write(folder, "config.json", eos_token_id=3)
    assert read(folder) == (3,)
    write(folder, "generation_config.json", eos_token_id=None)
    assert read(folder) == (3,)
    write(folder, "generation_config.json", eos_token_id=[4, 5])
    assert read(folder) == (4, 5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eos_token": "</s>"}, (7, TOKENIZERS_OWN)),
        ({"eos_token": {"content": "</s>", "special": True}}, (7, TOKENIZERS_OWN)),
        ({"eos_token": "<s>"}, (7, 0)),
        ({"eos_token": "dog"}, (7,)),  # becomes a token beyond the rows of the logits
        ({"eos_token": None}, (7,)),
        ({"eos_token": ""}, (7,)),
        ({}, (7,)),
        ({"eos_token": 5}, (7,)),  # malformed: the router refuses it
        ({"eos_token": {}}, (7,)),
    ],
)
def test_the_tokenizers_own_end_of_sequence_token_is_one(folder, settings, expected):
    write_byte_level_folder(folder)
    write(folder, "config.json", eos_token_id=7)
    write(folder, "tokenizer_config.json", **settings)
    assert read(folder) == expected


def test_a_tokenizer_without_added_tokens_names_the_token_too(folder):
    write_byte_level_folder(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    del content["added_tokens"]
    content["model"]["vocab"]["</s>"] = TOKENIZERS_OWN
    write(folder, "tokenizer.json", **content)
    write(folder, "tokenizer_config.json", eos_token="</s>")
    assert read(folder) == (TOKENIZERS_OWN,)


def test_older_files_name_the_token_too(folder):
    write_byte_level_folder(folder)
    write(folder, "tokenizer_config.json")
    write(folder, "special_tokens_map.json", eos_token={"content": "</s>"})
    assert read(folder) == (TOKENIZERS_OWN,)


@pytest.mark.parametrize("stated", ["1", 1.5, None, [1], True])
def test_an_id_in_a_vocabulary_that_is_no_integer_is_none_of_them(folder, stated):
    write(folder, "config.json", eos_token_id=7, model_type="gpt2")
    write(folder, "vocab.json", **{"a": 0, "</s>": stated})
    (folder / "merges.txt").write_text("#version: 0.2\n")
    write(folder, "tokenizer_config.json", eos_token="</s>")
    assert all(type(token_id) is int for token_id in read(folder))


def test_a_model_without_a_readable_tokenizer_has_the_ids_of_its_files(folder):
    write(folder, "config.json", eos_token_id=7)
    write(folder, "tokenizer_config.json", eos_token="</s>")
    assert read(folder) == (7,)
    (folder / "tokenizer.json").write_text("{")
    assert read(folder) == (7,)
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    assert read(folder) == (7,)
