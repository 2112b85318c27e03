"""What a release must have: the checks of scripts/build_release.py, and the names in the wheel."""

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import baton
from baton.common.own_packages import PACKAGES
from kernels.library.variants import library_sets
from scripts.build_release import ReleaseError, build_release, check_protos, check_wheel

ROOT = Path(__file__).parents[3]
COMMON_PACKAGES = ROOT / "tests" / "data" / "common_packages.json"
WHEEL = "baton_llm-0.1.0-py3-none-manylinux_2_31_x86_64.whl"
BUF = Path(sys.executable).with_name("buf")
PROTO = """\
syntax = "proto3";
package a.v1;
message Question {
  string text = 1;
  bool is_last = 2;
}
"""


def names_in_site_packages():
    """Top-level names of the wheel, as pyproject.toml maps the folders."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    paths = [wheel["sources"].get(name, name) for name in wheel["packages"]]
    return {path.split("/")[0] for path in paths} | {"baton_llm.pth"}


def names_of(distribution):
    parts = [path.parts for path in distribution.files or () if path.parts[0] not in ("..", "/")]
    return {names[0] for names in parts} - {"__pycache__"}


def test_no_common_package_has_a_name_of_the_wheel():
    recorded = json.loads(COMMON_PACKAGES.read_text())
    common = {name: each["names"] for name, each in recorded.items()}
    assert len(common) >= 30
    own = names_in_site_packages()
    assert own == {"baton", "baton_llm.pth"}
    assert not [name for name, names in common.items() if own & {*names}]
    # Why the other packages lie in a folder of `baton`.
    colliding = {name for name, names in common.items() if {*PACKAGES} & {*names}}
    assert colliding == {"kernels"}


def test_no_installed_package_has_a_name_of_the_wheel():
    others = [each for each in metadata.distributions() if each.name != "baton-llm"]
    assert len(others) > 50
    own = names_in_site_packages()
    assert not [each.name for each in others if own & names_of(each)]


@pytest.fixture
def tree(tmp_path):
    """A checkout with a package, and sources of both sets of libraries."""
    root = tmp_path / "tree"
    for name in ("kernels/native/src/a.cpp", "kvstore/native/src/b.cpp", "engine/__init__.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", ".")
    return root


def git(root, *arguments):
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def make_wheel(tree, *, name=WHEEL, without=(), problem=""):
    """Writes a wheel of the tree's files, their libraries, and records of them."""
    packages = "baton/_packages"
    files = dict.fromkeys((f"{packages}/{path}" for path in ("engine/__init__.py",)), "")
    for part in library_sets(tree):
        folder = f"{packages}/{part.library_folder.relative_to(tree)}"
        source = next(part.source_folder.iterdir()).relative_to(tree)
        files[f"{packages}/{source}"] = ""
        for variant in part.variants:
            record = {"sources": "", "command": "", "problem": problem}
            files[f"{folder}/libbaton_cpu_{variant.name}.so"] = ""
            files[f"{folder}/{variant.name}.json"] = json.dumps(record)
    wheel = tree.parent / name
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            if Path(path).name not in without:
                archive.writestr(path, text)
    return wheel


def test_a_whole_wheel_is_released(tree):
    check_wheel(make_wheel(tree), tree)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"without": ("libbaton_cpu_block_keys.so",)}, "libbaton_cpu_block_keys.so"),
        ({"without": ("__init__.py",)}, "engine/__init__.py"),
        ({"problem": "no AVX-512"}, r"block_keys \(no AVX-512\)"),
        ({"name": "baton_llm-0.1.0-py3-none-any.whl"}, "no tag of manylinux"),
    ],
    ids=["library", "file", "compiler", "tag"],
)
def test_a_wheel_that_lacks_something_is_refused_by_name(tree, options, words):
    with pytest.raises(ReleaseError, match=words):
        check_wheel(make_wheel(tree, **options), tree)


def test_a_refused_release_leaves_an_earlier_one_as_it_was(tree, tmp_path, monkeypatch):
    def build(sources, target, folder, time_s):
        if target == "wheel":
            return make_wheel(tree, without=("__init__.py",)).rename(folder / WHEEL)
        sdist = folder / "baton_llm-0.1.0.tar.gz"
        with tarfile.open(sdist, "w:gz") as archive:
            archive.add(sources, "baton_llm-0.1.0")
        return sdist

    monkeypatch.setattr("scripts.build_release._build", build)
    out = tmp_path / "dist"
    out.mkdir()
    (out / "SHA256SUMS").write_text("earlier")
    with pytest.raises(ReleaseError, match=r"engine/__init__\.py"):
        build_release(tree, out, time_s=0)
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("SHA256SUMS", "earlier")]


@pytest.mark.skipif(not BUF.exists() or shutil.which("git") is None, reason="no buf")
def test_protos_that_an_earlier_release_would_misread_are_refused(tree):
    proto = tree / "protos" / "a" / "v1" / "a.proto"
    proto.parent.mkdir(parents=True)

    def commit(text):
        proto.write_text(text)
        git(tree, "add", ".")
        git(tree, "commit", "--quiet", "--message=protos")

    commit(PROTO)
    commit(PROTO.replace("text", "words"))
    assert "no earlier tag" in check_protos(tree, BUF)
    shallow = tree.with_name("shallow")
    git(tree, "clone", "--quiet", "--depth=1", tree.as_uri(), str(shallow))
    with pytest.raises(ReleaseError, match="a shallow clone does not know the last tag"):
        check_protos(shallow, BUF)
    git(tree, "tag", "v0.1.0")
    commit(PROTO.replace("text = 1;", "text = 1;\n  string more = 3;"))
    assert check_protos(tree, BUF) == "protos: processes of v0.1.0 understand them"
    commit(PROTO.replace("bool is_last", "string is_last"))
    with pytest.raises(ReleaseError, match=r"v0\.1\.0:\n.*is_last.*type"):
        check_protos(tree, BUF)


def test_the_images_version_is_the_packages():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert f"ARG VERSION={baton.__version__}" in lines
