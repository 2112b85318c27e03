"""How an engine's blocks are cut into transfer blocks, and put together from them."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.spec import KvCacheSpec
from engine.kv_transfer.blocks import PromptBlock, TransferBlocks, TransferItem, held_by
from engine.kv_transfer.prefetches import PromptParts
from kvstore.block_key import BlockKeyChain, layer_group_key
from kvstore.handoff import KvHandoff

KEYS = [bytes([index]) * 32 for index in range(12)]
SPEC = KvCacheSpec(8)


def saved(num_first: int, num_keys: int, *, handoff_id: str = "h", size: int = 2) -> KvHandoff:
    """Transfer blocks `num_first` and on of a prompt."""
    return KvHandoff(
        handoff_id=handoff_id,
        namespace=b"",
        block_keys=tuple(KEYS[num_first : num_first + num_keys]),
        num_tokens=(num_first + num_keys) * size,
        connector="fake",
        digest_scheme="",
        lease_ms=1,
    )


def test_blocks_that_go_as_they_are_keep_their_ids() -> None:
    cut = TransferBlocks(SPEC, 8)
    items = list(cut.items(range(1, 3), KEYS, [[7, 5, 3]], [0]))
    assert items == [TransferItem(1, KEYS[1], 5, 5), TransferItem(2, KEYS[2], 3, 3)]
    assert cut.ids_in([4, 2]) == [4, 2]
    first, second = PromptParts(cut).whole_blocks(saved(0, 2, size=8))
    assert (first, second) == (PromptBlock((KEYS[0],), None), PromptBlock((KEYS[1],), KEYS[0]))


def test_parts_of_a_block_follow_each_other_in_the_pool() -> None:
    cut = TransferBlocks(SPEC, 2)
    items = list(cut.items(range(3, 6), KEYS, [[7, 5]], [0]))
    assert [(item.block_id, item.transfer_id) for item in items] == [(7, 31), (5, 20), (5, 21)]
    assert [item.key for item in items] == KEYS[3:6]
    assert held_by(items) == [7, 5]
    assert cut.ids_in([1, 0]) == [4, 5, 6, 7, 0, 1, 2, 3]


def test_what_a_layer_group_does_not_have_is_not_moved() -> None:
    cut = TransferBlocks(KvCacheSpec(4, (None, 3)), 2)
    items = list(cut.items(range(1, 4), KEYS, [[7, 5], [-1, 6]], [0, 1]))
    assert [(item.index, item.transfer_id) for item in items] == [
        (1, 15),
        (2, 10),
        (2, 12),
        (3, 11),
        (3, 13),
    ]
    assert items[2].key == layer_group_key(KEYS[2], 1)
    assert held_by(items) == [7, 5, 6]


@given(cuts=st.lists(st.integers(0, 12)), size=st.sampled_from([1, 2, 4, 8]))
def test_a_prompt_told_in_portions_gives_each_block_once(cuts: list[int], size: int) -> None:
    parts = PromptParts(TransferBlocks(SPEC, size))
    blocks = []
    bounds = sorted({0, *cuts})
    for first, end in pairwise(bounds):
        blocks += parts.whole_blocks(saved(first, end - first, size=size))
    count = 8 // size
    whole = bounds[-1] // count * count
    assert [list(block.keys) for block in blocks] == [
        KEYS[first : first + count] for first in range(0, whole, count)
    ]
    assert [block.parent for block in blocks] == [None, *(block.key for block in blocks)][:-1]


def test_nothing_follows_what_did_not_come() -> None:
    parts = PromptParts(TransferBlocks(SPEC, 2))
    assert parts.whole_blocks(saved(0, 3)) == []
    assert parts.whole_blocks(saved(5, 4)) == []  # the fourth is lost
    assert parts.whole_blocks(saved(9, 3)) == []
    (again,) = parts.whole_blocks(saved(0, 4))
    assert again == PromptBlock(tuple(KEYS[:4]), None)
    parts.forget("h")
    assert parts.whole_blocks(saved(4, 4)) == []


def test_prompts_do_not_mix_and_few_are_remembered() -> None:
    parts = PromptParts(TransferBlocks(SPEC, 2))
    assert parts.whole_blocks(saved(0, 3, handoff_id="a")) == []
    (first,) = parts.whole_blocks(saved(0, 5, handoff_id="b"))
    for index in range(1023):
        parts.whole_blocks(saved(0, 1, handoff_id=str(index)))
    (second,) = parts.whole_blocks(saved(5, 3, handoff_id="b"))
    assert second == PromptBlock(tuple(KEYS[4:8]), first.key)
    assert parts.whole_blocks(replace(saved(3, 1), handoff_id="a")) == [], "forgotten"


def test_a_pool_blocks_key_names_all_tokens_before() -> None:
    tokens = list(range(16))
    chain = BlockKeyChain(b"n", 2, blocks_per_pool_block=4)
    first, _ = chain.extend_pool(tokens)
    other = BlockKeyChain(b"n", 2, blocks_per_pool_block=4)
    assert other.extend_pool([9, *tokens[1:]])[0] != first
