"""Block keys of the native library: the same bytes as Python's, or no library."""

import hashlib
import logging
import os
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.library.build import Status, build, find_compiler
from kernels.library.variants import library_sets
from kvstore import block_key
from kvstore.block_key import KEY_BYTES, BlockKeyChain, derive_namespace
from kvstore.native_keys import LIBRARY_FOLDER, HashBlocks, load_library

SOURCES = library_sets()[-1]
COMPILER = find_compiler()
PERSON = b"full".ljust(16, b"\0")
NAMESPACE = derive_namespace(
    model_fingerprint=b"model", kv_dtype="float32", layout_version=1, block_size=16
)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def built(folder: Path, source: str | None = None) -> Path:
    """Builds the library, of the product's source or of another one; returns its folder."""
    sources = SOURCES.source_folder
    if source is not None:
        sources = folder / "src"
        sources.mkdir()
        (sources / "block_keys.cpp").write_text(source)
    (outcome,) = build(sources, folder / "lib", compiler=COMPILER, variants=SOURCES.variants)
    assert outcome.status is Status.BUILT, outcome.output
    return folder / "lib"


@pytest.fixture(scope="module")
def hash_blocks(tmp_path_factory: pytest.TempPathFactory) -> HashBlocks:
    function = load_library(built(tmp_path_factory.mktemp("keys")))
    assert function is not None
    return function


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes block keys load their library from a folder."""
    monkeypatch.setattr(block_key, "load_library", lambda: load_library(folder))
    monkeypatch.setattr(block_key, "_native", block_key._native.__wrapped__)


def blake2b(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=PERSON)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


@settings(max_examples=200, deadline=None)
@given(
    block_size=st.integers(1, 70),
    token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    parent=st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
)
def test_keys_are_hashlibs(
    hash_blocks: HashBlocks, block_size: int, token_ids: list[int], parent: bytes
) -> None:
    blocks = array("I", token_ids[: len(token_ids) // block_size * block_size])
    joined = hash_blocks(PERSON, parent, blocks, block_size, KEY_BYTES)
    assert len(joined) == len(blocks) // block_size * KEY_BYTES
    for index in range(len(blocks) // block_size):
        words = blocks[index * block_size : (index + 1) * block_size]
        parent = blake2b(parent, b"".join(word.to_bytes(4, "little") for word in words))
        assert joined[index * KEY_BYTES : (index + 1) * KEY_BYTES] == parent


def test_long_prompts_have_the_keys_of_python(
    hash_blocks: HashBlocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = [7 * index % 50_021 for index in range(40_000)]
    keys = {}
    for name, function in (("python", None), ("native", hash_blocks)):
        monkeypatch.setattr(block_key, "_native", lambda function=function: function)
        chain = BlockKeyChain(NAMESPACE, 16)
        chain.extend(token_ids[:10_007])  # a chain that grows
        keys[name] = list(chain.extend(token_ids))
    assert keys["native"] == keys["python"]
    assert len(set(keys["native"])) == 2500


def test_a_library_that_computes_other_keys_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = (SOURCES.source_folder / "block_keys.cpp").read_text()
    use(
        monkeypatch, built(tmp_path, source.replace("std::rotr(b ^ c, 63)", "std::rotr(b ^ c, 62)"))
    )
    with caplog.at_level(logging.WARNING):
        assert block_key._native() is None
    assert "another format" in caplog.text


@pytest.mark.parametrize("content", [b"", b"no library"], ids=["absent", "broken"])
def test_without_a_library_python_computes_keys(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content:
        (tmp_path / "libbaton_cpu_block_keys.so").write_bytes(content)
    use(monkeypatch, tmp_path)
    assert block_key._native() is None
    expected = [blake2b(block_key._hash(b"root", NAMESPACE, b"", b""), bytes(64))]
    assert list(BlockKeyChain(NAMESPACE, 16).extend([0] * 16)) == expected


@pytest.mark.skipif("CI" not in os.environ, reason="a checkout may not have been built")
def test_the_build_makes_the_library_that_is_loaded() -> None:
    assert load_library(LIBRARY_FOLDER) is not None
    assert block_key._native() is not None
