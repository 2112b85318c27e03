"""Names of Hub models with a revision."""

import pytest

from baton.common.errors import ConfigurationError
from baton.common.model_files.named_models import default_model_name, split_revision, with_revision
from baton.common.model_files.tokenizer_files import resolve_folder
from engine.runtime.weights.checkpoint import open_checkpoint


def test_a_revision_follows_the_name():
    assert split_revision("org/model@v1.0") == ("org/model", "v1.0")
    assert split_revision("org/model") == ("org/model", None)
    assert with_revision("org/model", None) == "org/model"
    assert with_revision("org/model", "v1") == with_revision("org/model@v1", "v1") == "org/model@v1"


def test_two_revisions_are_refused():
    with pytest.raises(ConfigurationError, match="--revision is 'v2'; --model names revision 'v1'"):
        with_revision("org/model@v1", "v2")


def test_a_folder_has_no_revision(tmp_path):
    with pytest.raises(ConfigurationError, match="is not on the Hub but a path"):
        with_revision(str(tmp_path), "v1")


def test_a_named_model_has_no_revision():
    with pytest.raises(ConfigurationError, match="demo is not on the Hub but a model of this mach"):
        with_revision("demo", "v1")


def test_a_revision_may_have_slashes(monkeypatch, tmp_path):
    calls = []

    def download(name, revision, allow_patterns):
        calls.append((name, revision))
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "config.json").write_text("{}")
    open_checkpoint("org/model@refs/pr/1", with_weights=False)
    assert calls == [("org/model", "refs/pr/1")]
    assert default_model_name("org/model@refs/pr/1") == "model@refs/pr/1"
    assert default_model_name("/models/a@b/model") == "model"


def test_the_revision_is_downloaded(monkeypatch, tmp_path):
    calls = []

    def download(name, revision, allow_patterns):
        calls.append((name, revision))
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_folder("org/model@v1") == tmp_path
    resolve_folder("org/model")
    assert calls == [("org/model", "v1"), ("org/model", None)]
