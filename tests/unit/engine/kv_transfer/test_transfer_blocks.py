"""Transfer blocks: division of pool blocks, and assembly of prompts from announced parts."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.spec import KvCacheSpec, StateSpacing
from engine.kv_transfer.blocks import PromptBlock, TransferBlocks, TransferItem, held_by
from engine.kv_transfer.prefetches import PromptParts
from kvstore.block_key import BlockKeyChain, layer_group_key, state_key
from kvstore.handoff import KvHandoff

KEYS = [bytes([index]) * 32 for index in range(12)]
SPEC = KvCacheSpec(8)


def handoff_of(num_first: int, num_keys: int, *, handoff_id: str = "h", size: int = 2) -> KvHandoff:
    """Returns a handoff of `num_keys` transfer blocks of a prompt from block `num_first` on."""
    return KvHandoff(
        handoff_id=handoff_id,
        namespace=b"",
        block_keys=tuple(KEYS[num_first : num_first + num_keys]),
        num_tokens=(num_first + num_keys) * size,
        connector="fake",
        digest_scheme="",
        lease_ms=1,
    )


def test_transfer_blocks_of_the_pools_size_keep_their_ids() -> None:
    transfer_blocks = TransferBlocks(SPEC, 8)
    items = list(transfer_blocks.items(range(1, 3), KEYS, [[7, 5, 3]], [0]))
    assert items == [TransferItem(1, KEYS[1], 5, 5), TransferItem(2, KEYS[2], 3, 3)]
    assert transfer_blocks.ids_in([4, 2]) == [4, 2]
    first, second = PromptParts(transfer_blocks).whole_blocks(handoff_of(0, 2, size=8))
    assert (first, second) == (PromptBlock((KEYS[0],), None), PromptBlock((KEYS[1],), KEYS[0]))


def test_the_transfer_blocks_of_a_pool_block_are_consecutive() -> None:
    transfer_blocks = TransferBlocks(SPEC, 2)
    items = list(transfer_blocks.items(range(3, 6), KEYS, [[7, 5]], [0]))
    assert [(item.block_id, item.transfer_id) for item in items] == [(7, 31), (5, 20), (5, 21)]
    assert [item.key for item in items] == KEYS[3:6]
    assert held_by(items) == [7, 5]
    assert transfer_blocks.ids_in([1, 0]) == [4, 5, 6, 7, 0, 1, 2, 3]


def test_blocks_that_a_layer_group_lacks_are_not_moved() -> None:
    transfer_blocks = TransferBlocks(KvCacheSpec(4, (None, 3)), 2)
    items = list(transfer_blocks.items(range(1, 4), KEYS, [[7, 5], [-1, 6]], [0, 1]))
    assert [(item.index, item.transfer_id) for item in items] == [
        (1, 15),
        (2, 10),
        (2, 12),
        (3, 11),
        (3, 13),
    ]
    assert items[2].key == layer_group_key(KEYS[2], 1)
    assert held_by(items) == [7, 5, 6]


def test_the_units_of_a_slot_follow_the_block_that_its_states_end_with() -> None:
    spec = KvCacheSpec(4, (None,), states=StateSpacing(4, 8))
    transfer_blocks = TransferBlocks(spec, 2, num_blocks=10, num_units=3)
    items = list(transfer_blocks.items(range(4), KEYS, [[7, 5], [11, 12]], [0, 0], {1: 12}))
    assert items[:4] == [
        TransferItem(index, KEYS[index], *ids)
        for index, ids in enumerate([(7, 14), (7, 15), (5, 10), (5, 11)])
    ]
    # Slot 12 is the third, so six units lie before it, behind the 20 transfer blocks of tokens.
    assert items[4:] == [TransferItem(3, state_key(KEYS[3], u), 12, 26 + u) for u in range(3)]
    assert len({item.key for item in items}) == 7


def test_a_sequence_is_looked_up_to_where_others_leave_states() -> None:
    spec = KvCacheSpec(4, (None, 3), states=StateSpacing(4, 8))
    transfer_blocks = TransferBlocks(spec, 2, num_blocks=10, num_units=3)
    # Multiples of 8, the prompt's last full block, and that of all tokens but the last.
    assert transfer_blocks.loadable_ends(15, 23) == [4, 6, 8, 10]
    assert transfer_blocks.loadable_ends(20, 20) == [4, 8]
    assert transfer_blocks.loadable_ends(2, 4) == []
    ends = transfer_blocks.loadable_ends(15, 17)
    assert ends == [4, 6, 8]
    keys = transfer_blocks.lookup_keys(KEYS, ends)
    assert len(keys) == len(set(keys)) == 8 * 2 + 3 * 3
    assert keys[7:11] == [
        layer_group_key(KEYS[3], 1),
        *(state_key(KEYS[3], unit) for unit in range(3)),
    ]
    found = [transfer_blocks.last_found(ends, num_found) for num_found in range(len(keys) + 1)]
    assert found == [0] * 11 + [4] * 7 + [6] * 7 + [8]


def test_without_states_a_sequence_is_looked_up_to_any_block() -> None:
    transfer_blocks = TransferBlocks(KvCacheSpec(8, (None, 3)), 2)
    ends = transfer_blocks.loadable_ends(15, 23)
    assert list(ends) == list(range(1, 12))
    assert transfer_blocks.lookup_keys(KEYS, ends) == transfer_blocks.token_keys(KEYS[:11])
    assert [transfer_blocks.last_found(ends, n) for n in (0, 1, 2, 5, 22)] == [0, 0, 1, 2, 11]


@given(cuts=st.lists(st.integers(0, 12)), size=st.sampled_from([1, 2, 4, 8]))
def test_a_prompt_announced_in_parts_gives_each_block_once(cuts: list[int], size: int) -> None:
    parts = PromptParts(TransferBlocks(SPEC, size))
    blocks = []
    bounds = sorted({0, *cuts})
    for first, end in pairwise(bounds):
        blocks += parts.whole_blocks(handoff_of(first, end - first, size=size))
    count = 8 // size
    whole = bounds[-1] // count * count
    assert [list(block.keys) for block in blocks] == [
        KEYS[first : first + count] for first in range(0, whole, count)
    ]
    assert [block.parent for block in blocks] == [None, *(block.key for block in blocks)][:-1]


def test_no_block_follows_a_missing_part() -> None:
    parts = PromptParts(TransferBlocks(SPEC, 2))
    assert parts.whole_blocks(handoff_of(0, 3)) == []
    assert parts.whole_blocks(handoff_of(5, 4)) == []  # blocks 3 and 4 were never announced
    assert parts.whole_blocks(handoff_of(9, 3)) == []
    (again,) = parts.whole_blocks(handoff_of(0, 4))
    assert again == PromptBlock(tuple(KEYS[:4]), None)
    parts.forget("h")
    assert parts.whole_blocks(handoff_of(4, 4)) == []


def test_prompts_are_kept_apart_and_a_bounded_number_is_remembered() -> None:
    parts = PromptParts(TransferBlocks(SPEC, 2))
    assert parts.whole_blocks(handoff_of(0, 3, handoff_id="a")) == []
    (first,) = parts.whole_blocks(handoff_of(0, 5, handoff_id="b"))
    for index in range(1023):
        parts.whole_blocks(handoff_of(0, 1, handoff_id=str(index)))
    (second,) = parts.whole_blocks(handoff_of(5, 3, handoff_id="b"))
    assert second == PromptBlock(tuple(KEYS[4:8]), first.key)
    assert parts.whole_blocks(replace(handoff_of(3, 1), handoff_id="a")) == [], (
        "prompt a was forgotten"
    )


def test_the_key_of_a_pool_block_depends_on_all_tokens_before_its_end() -> None:
    tokens = list(range(16))
    chain = BlockKeyChain(b"n", 2, blocks_per_pool_block=4)
    first, _ = chain.extend_pool(tokens)
    other = BlockKeyChain(b"n", 2, blocks_per_pool_block=4)
    assert other.extend_pool([9, *tokens[1:]])[0] != first
