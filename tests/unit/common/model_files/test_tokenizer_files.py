"""`load_tokenizer`: settings of the files that it overrides, and files that it cannot read.

tests/unit/router/requests/test_tokenizer.py compares what it loads with `transformers`.
"""

import subprocess
import sys

import pytest
import tokenizers

from baton.common.errors import ConfigurationError
from baton.common.model_files.tokenizer_files import load_tokenizer, resolve_folder
from tests.support.tokenizer_folders import CORPUS, write_byte_level_folder, write_opt_folder


def test_the_loader_imports_neither_torch_nor_transformers():
    code = "import sys, baton.common.model_files.tokenizer_files as _; "
    code += "print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert run.stdout.strip() == b"set()"


def test_truncation_and_padding_of_the_file_are_turned_off(tmp_path):
    write_byte_level_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.decode(loaded.encode(CORPUS[0]).ids) == CORPUS[0]
    assert len(loaded.encode("a").ids) == 2


def test_the_error_of_a_sentencepiece_file_shows_how_to_convert_it(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(
        ConfigurationError, match=r"convert it once with: .*save_pretrained"
    ) as info:
        load_tokenizer(tmp_path)
    assert "\n" not in info.value.message


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0"}', "\xff"])
def test_a_broken_file_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigurationError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path)


def test_another_class_without_tokenizer_json_is_refused(tmp_path):
    write_opt_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ConfigurationError, match="Qwen2Tokenizer cannot be built"):
        load_tokenizer(tmp_path)


def test_an_unknown_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("nobody/nothing", str(tmp_path / "no" / "such" / "folder")):
        with pytest.raises(ConfigurationError, match="neither a folder nor a Hub repository"):
            resolve_folder(name)
