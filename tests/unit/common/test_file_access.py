"""A model's file that is there and cannot be read is named with the reason, by all who read it."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from baton.common.file_access import (
    UnreadableFileError,
    find_files,
    has_file,
    read_text,
    unreadable,
)
from baton.common.model_files.files import local_model, open_model_files
from baton.common.model_files.named_models import demo_model_path
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CredentialsConfig
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.runtime.weights.loader import load_model
from router.config.served_model import ServedModelConfig
from router.models import RouterFiles
from tests.support.other_user import as_other_user

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
WORKER_FILES = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES)
ROUTER_FILES = ("chat_template.jinja", "config.json", "generation_config.json", *TOKENIZER_FILES)
CASES = [("worker", name) for name in WORKER_FILES] + [("router", name) for name in ROUTER_FILES]


@pytest.fixture
def open_folder():
    """A folder that every user can enter; those of pytest are open to one alone."""
    folder = Path(tempfile.mkdtemp(prefix="baton-test-"))
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.fixture
def model(open_folder) -> Path:
    """A folder with links to the files of the demo model."""
    folder = open_folder / "model"
    folder.mkdir(mode=0o755)
    for file in demo_model_path().iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    return folder


def load(reader: str, path: Path) -> object:
    if reader == "worker":
        return load_model(str(path), "auto", "cpu", progress=False)
    return RouterFiles.load(ServedModelConfig(model=str(path), decode=("a:1",)))


def refusal(reader: str, path: Path) -> str:
    with pytest.raises(ConfigurationError) as failure:
        load(reader, path)
    assert "\n" not in failure.value.message
    return failure.value.message


@pytest.mark.parametrize(("reader", "name"), CASES)
def test_a_file_of_another_user_is_named_with_the_user_who_may_not_read_it(model, reader, name):
    load(reader, model)  # so that nothing else is to blame
    file = model / name
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    file.chmod(0)
    with as_other_user() as user:
        message = refusal(reader, model)
    assert message.startswith(f"cannot read {file}: permission denied to {user}; {file} is ")
    assert f"---------- of uid {os.geteuid()}, gid {os.getegid()}" in message
    assert "chmod -R a+rX" in message


@pytest.mark.parametrize(("reader", "name"), CASES)
def test_a_link_to_nothing_is_named_with_its_target(model, reader, name):
    """As in a snapshot of the Hub's cache that is mounted without the folder around it."""
    file, target = model / name, Path("../../blobs/0123")
    file.unlink()
    file.symlink_to(target)
    message = refusal(reader, model)
    assert message.startswith(f"cannot read {file}: it is a link to {target}, which does not exist")
    assert "mount the whole folder models--ORG--NAME" in message


@pytest.mark.parametrize("reader", ["worker", "router"])
@pytest.mark.parametrize("closed", ["model", "parent"])
def test_a_closed_folder_is_named(model, reader, closed):
    folder = model if closed == "model" else model.parent
    folder.chmod(0)
    with as_other_user() as user:
        message = refusal(reader, model)
    assert f"permission denied to {user}; {folder} is d--------- of uid {os.geteuid()}" in message


@pytest.mark.parametrize("reader", ["worker", "router"])
def test_a_gguf_file_of_another_user_and_a_link_to_none(open_folder, reader):
    file, link = open_folder / "model.gguf", open_folder / "link.gguf"
    file.touch(mode=0)
    link.symlink_to("nowhere.gguf")
    with as_other_user() as user:
        assert f"cannot read {file}: permission denied to {user}" in refusal(reader, file)
    assert f"{link}: it is a link to nowhere.gguf, which does not exist" in refusal(reader, link)


def test_a_shard_that_cannot_be_read_is_not_called_absent(model):
    shard = model / "model-1.safetensors"
    (model / "model.safetensors").rename(shard)
    index = model / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    load("worker", model)
    shard.unlink()
    shard.symlink_to("blobs/1")
    assert f"cannot read {shard}: it is a link to blobs/1" in refusal("worker", model)


def test_further_templates_and_pickled_weights_that_cannot_be_listed_are_not_left_out(model):
    folder = model / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").symlink_to("nowhere")
    assert f"cannot read {folder / 'tool_use.jinja'}: it is a link" in refusal("router", model)
    folder.chmod(0)
    with as_other_user():
        assert f"cannot read {folder}: permission denied" in refusal("router", model)


def test_weights_that_vanish_while_they_are_read_are_named(model):
    checkpoint = open_checkpoint(str(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"cannot read .*model\.safetensors: No such file"):
        checkpoint.fingerprint()


@pytest.mark.parametrize("reader", ["worker", "router"])
def test_an_empty_folder_is_called_empty(open_folder, reader):
    """A container engine makes one for a volume whose folder does not exist."""
    assert "the folder is empty" in refusal(reader, open_folder)
    (open_folder / "readme").touch()
    assert "the folder is empty" not in refusal(reader, open_folder)


def test_a_folder_of_the_hubs_cache_stands_for_its_snapshot(open_folder):
    cache = open_folder / "models--org--name"
    snapshots = [cache / "snapshots" / name for name in ("abc", "def")]
    snapshots[0].mkdir(parents=True)
    (cache / "blobs").mkdir()
    shutil.copy(demo_model_path() / "config.json", cache / "blobs" / "1")
    (snapshots[0] / "config.json").symlink_to("../../blobs/1")
    assert local_model(cache).path == snapshots[0]
    assert open_model_files(cache).read_json("config.json")["model_type"] == "llama"
    snapshots[1].mkdir()
    with pytest.raises(ConfigurationError, match="several snapshots; name the folder of one: abc"):
        local_model(cache)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("def")
    assert local_model(cache).path == snapshots[1]
    (cache / "config.json").touch()
    assert local_model(cache).path == cache


def test_what_is_absent_is_no_error(open_folder):
    assert not has_file(open_folder / "none")
    assert not has_file(open_folder / ("n" * 300))
    assert not has_file(open_folder / "a\0b")
    assert read_text(open_folder / "none") is None
    assert find_files(open_folder / "none", "*") == []


def test_something_else_than_a_file_is_refused(open_folder):
    with pytest.raises(UnreadableFileError, match="it is no file"):
        has_file(open_folder)
    loop = open_folder / "loop"
    loop.symlink_to("loop")
    with pytest.raises(UnreadableFileError, match="Too many levels of symbolic links"):
        has_file(loop)


def test_a_token_of_another_user_and_a_folder_for_it_name_the_user(open_folder):
    """As of a volume that containers of another user have filled."""
    file = open_folder / "token"
    file.write_text("t" * 40)
    file.chmod(0)
    (open_folder / "closed").mkdir(mode=0)
    for path in (file, open_folder / "closed" / "token"):
        with as_other_user() as user, pytest.raises(ConfigurationError) as failure:
            ClusterSecurity.from_environment(CredentialsConfig(token_file=str(path)), None)
        assert failure.value.message.startswith(f"--cluster-token-file {path}: ")
        assert failure.value.message.endswith(f"permission denied to {user}")


def test_a_refusal_that_no_mode_explains_names_security_modules(open_folder):
    error = unreadable(open_folder, PermissionError(errno.EACCES, "Permission denied"))
    assert "the mode of" in error.message
    assert "SELinux" in error.message
