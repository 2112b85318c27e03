"""KV events in vLLM's form: the bytes that vLLM's classes write, bounded messages, a history that
says by itself what is cached.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.spec import KvCacheSpec, StateSpacing
from engine.kv_cache.token_log import TokensCleared, TokensRemoved, TokensStored
from tests.support.kv_event_reader import KVEventBatch, StoredBlocks
from worker.kv_events.history import MessageHistory
from worker.kv_events.messages import VllmEvents

KEYS = [bytes([number]) * 32 for number in range(1, 6)]


def spec(block_size=2, windows=(None,), states=None):
    return KvCacheSpec(block_size, windows, 64, states)


def stored(keys, parent=None, salt="", layer_group=0, block_size=2):
    tokens = tuple(1000 + index for index in range(len(keys) * block_size))
    return TokensStored(layer_group, tuple(keys), parent, tokens, salt)


def payloads(events, **options):
    batches = VllmEvents(spec(**options)).batches(events)
    return [msgspec.msgpack.encode(batch.payload(1.5, 0)) for batch in batches]


def test_bytes_are_those_of_vllm():
    """Written once by the classes of `tests.support.kv_event_reader`, which are vLLM's."""
    events = [
        TokensCleared(),
        stored(KEYS[:2]),
        stored(KEYS[2:3], KEYS[1]),
        TokensRemoved(0, (KEYS[2],)),
    ]
    (payload,) = payloads(events)
    assert payload == GOLDEN
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert msgspec.msgpack.encode(batch) == GOLDEN
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
    assert batch.events[2].parent_block_hash == KEYS[1]


GOLDEN = (
    b"\x93\xcb\x3f\xf8"
    + bytes(6)
    + b"\x94\x91\xb0AllBlocksCleared"
    + (
        b"\x9c\xabBlockStored\x92\xc4\x20" + KEYS[0] + b"\xc4\x20" + KEYS[1] + b"\xc0\x94"
        b"\xcd\x03\xe8\xcd\x03\xe9\xcd\x03\xea\xcd\x03\xeb\x02\xc0\xa3GPU\xc0\xc0\xc0\xc0\xc0"
        b"\x9c\xabBlockStored\x91\xc4\x20" + KEYS[2] + b"\xc4\x20" + KEYS[1] + b"\x92"
        b"\xcd\x03\xe8\xcd\x03\xe9\x02\xc0\xa3GPU\xc0\xc0\xc0\xc0\xc0"
        b"\x94\xacBlockRemoved\x91\xc4\x20" + KEYS[2] + b"\xa3GPU\xc0\x00"
    )
)


def test_a_salt_is_an_extra_key_of_the_first_block():
    (payload,) = payloads([stored(KEYS[:2], salt="pepper"), stored(KEYS[2:], KEYS[1], "pepper")])
    first, second = msgspec.msgpack.decode(payload, type=KVEventBatch).events
    assert first.extra_keys == [("pepper",), None]
    assert second.extra_keys is None


def test_groups_are_numbered_and_described_if_there_are_several():
    events = [stored(KEYS[:1], layer_group=group) for group in range(3)]
    options: dict[str, Any] = {"windows": (None, 7), "states": StateSpacing.of(64)}
    (payload,) = payloads([*events, TokensRemoved(2, (KEYS[0],))], **options)
    *groups, removed = msgspec.msgpack.decode(payload, type=KVEventBatch).events
    kinds = [
        (one.group_idx, one.kv_cache_spec_kind, one.kv_cache_spec_sliding_window) for one in groups
    ]
    assert kinds == [(0, "full_attention", None), (1, "sliding_window", 7), (2, "mamba", None)]
    assert removed.group_idx == 2


@pytest.mark.parametrize("block_size", [1, 16, 4096, 16384])
def test_large_events_come_in_several_messages(block_size):
    keys = [number.to_bytes(32, "big") for number in range(1200 if block_size < 4096 else 5)]
    events = [TokensCleared(), stored(keys, block_size=block_size), TokensRemoved(0, tuple(keys))]
    read = StoredBlocks()
    sizes = []
    for payload in payloads(events[:2], block_size=block_size):
        sizes.append(len(payload))
        read.apply(msgspec.msgpack.decode(payload, type=KVEventBatch))
    assert list(read.blocks) == keys
    parents = [None, *keys[:-1]]
    assert [block.parent for block in read.blocks.values()] == parents
    tokens = [token for block in read.blocks.values() for token in block.token_ids]
    assert tokens == list(events[1].token_ids)
    assert max(sizes) <= max(64 * 1024, 5 * block_size + 1024)
    for payload in payloads(events[2:], block_size=block_size):
        read.apply(msgspec.msgpack.decode(payload, type=KVEventBatch))
    assert not read.blocks


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=60), st.integers(0, 80))
def test_a_history_is_enough_to_know_what_is_cached(steps, start):
    """The publisher starts over when it is full, as it must."""
    history = MessageHistory(max_keys=40)
    sent: list[tuple[int, bytes, bool]] = []
    for num_keys, is_cleared in [(0, True), *steps]:
        starts_over = is_cleared or history.is_full
        message = history.add(bytes([num_keys]), num_keys, starts_over=starts_over)
        sent.append((message.number, message.payload, starts_over))
    assert [number for number, *_ in sent] == list(range(history.next_number))
    begin = max(number for number, _, starts_over in sent if starts_over)
    number, answer = start, []
    while (found := history.first_from(number)) is not None:
        answer.append((found.number, found.payload))
        number = found.number + 1
    assert answer == [one[:2] for one in sent[max(start, begin) :]]
    assert sum(num_keys for num_keys, _ in steps[begin:]) <= 40 + 30


def test_without_a_socket_for_requests_no_message_is_kept():
    history = MessageHistory(None)
    for number in range(3):
        assert history.add(b"", 100, starts_over=number == 0).number_frame == bytes(7) + bytes(
            [number]
        )
    assert history.first_from(0) is None
    assert not history.is_full
