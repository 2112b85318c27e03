"""Block keys: what they depend on, and that they are the same in every process."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import block_key, formats
from kvstore.block_key import (
    KEY_BYTES,
    BlockKeyChain,
    derive_namespace,
    layer_group_key,
    tail_key,
)
from kvstore.formats import describe_formats

NAMESPACE = derive_namespace(
    model_fingerprint=b"model", kv_dtype="float32", layout_version=1, block_size=4
)
TOKENS = list(range(12))
# Pinned: a change of these requires a new KEY_FORMAT_VERSION.
PINNED_KEY = "c74c67be9df239216c05a6418f7d3724522ff4df89e7ed39a2e50395749d7a65"
PINNED_TAIL = "f89bc1ec0c94d634e6c3e3346752ae995c7f4dcd6fda1318a9b6afa511fb1cf0"


def keys_of(token_ids: list[int], namespace: bytes = NAMESPACE, **roots: object) -> list[bytes]:
    return list(BlockKeyChain(namespace, 4, **roots).extend(token_ids))


def test_keys_are_the_same_in_every_process() -> None:
    assert keys_of(TOKENS)[2].hex() == PINNED_KEY
    assert tail_key(keys_of(TOKENS)[2], [1, 2], "handoff").hex() == PINNED_TAIL


def test_python_hash_seeds_do_not_matter() -> None:
    program = (
        "from tests.unit.kvstore.test_block_key import keys_of, TOKENS; "
        "print(keys_of(TOKENS)[2].hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {PINNED_KEY}


def test_each_field_that_determines_the_bytes_changes_every_key() -> None:
    fields = {
        "model_fingerprint": b"model",
        "kv_dtype": "float32",
        "layout_version": 1,
        "block_size": 4,
    }
    changes = {
        "model_fingerprint": b"other",
        "kv_dtype": "bfloat16",
        "layout_version": 2,
        "block_size": 8,
    }
    namespaces = {derive_namespace(**fields)}
    namespaces |= {derive_namespace(**(fields | {name: changes[name]})) for name in fields}
    assert len(namespaces) == 1 + len(fields)

    roots = [{}, {"cache_salt": "tenant"}, {"lora": b"tenant"}]
    chains = [keys_of(TOKENS, **root) for root in roots] + [keys_of(TOKENS, b"other")]
    keys = [key for chain in chains for key in chain]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_a_chain_extended_in_parts_has_the_same_keys(tokens: list[int], cuts: list[int]) -> None:
    chain = BlockKeyChain(NAMESPACE, 4)
    for cut in sorted(cuts):
        chain.extend(tokens[:cut])

    assert list(chain.extend(tokens)) == keys_of(tokens)
    assert len(chain.keys) == len(tokens) // 4


@given(
    first=st.lists(st.integers(0, 1), max_size=16), second=st.lists(st.integers(0, 1), max_size=16)
)
def test_keys_are_equal_exactly_for_equal_prefixes(first: list[int], second: list[int]) -> None:
    shared = 0
    while first[shared : shared + 1] == second[shared : shared + 1] and shared < len(first):
        shared += 1
    equal = [a == b for a, b in zip(keys_of(first), keys_of(second), strict=False)]

    assert equal == [index < shared // 4 for index in range(len(equal))]


def test_tail_keys_depend_on_the_parent_the_tokens_and_the_handoff() -> None:
    parent = keys_of(TOKENS)[2]
    tails = {
        tail_key(parent, [1, 2], "a"),
        tail_key(parent, [1, 2], "b"),
        tail_key(parent, [1], "a"),
        tail_key(keys_of(TOKENS)[1], [1, 2], "a"),
        BlockKeyChain(NAMESPACE, 2).extend([1, 2])[0],
    }
    assert len(tails) == 5


def test_each_layer_group_has_its_own_keys() -> None:
    keys = keys_of(TOKENS)
    assert [layer_group_key(key, 0) for key in keys] == keys
    grouped = {layer_group_key(key, group) for key in keys for group in range(3)}
    assert len(grouped) == 9
    assert {len(key) for key in grouped} == {KEY_BYTES}


@pytest.mark.parametrize(
    "name", ["KEY_FORMAT_VERSION", "OBJECT_FORMAT_VERSION", "HANDOFF_FORMAT_VERSION"]
)
def test_another_version_of_any_format_is_another_namespace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (formats, block_key):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, 2)
    other = derive_namespace(
        model_fingerprint=b"model", kv_dtype="float32", layout_version=1, block_size=4
    )
    assert other != NAMESPACE
    assert f"{name.partition('_')[0].lower()}s 2" in describe_formats()
