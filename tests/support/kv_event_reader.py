"""A subscriber of KV events, with the classes that vLLM documents for subscribers, and what the
events say is cached.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

__all__ = [
    "END",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "KVEventBatch",
    "KvEventReader",
    "StoredBlocks",
]

END = bytes([255]) * 8
"""Frame of the number that ends an answer."""


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(frozen=True)
class StoredBlock:
    parent: bytes | None
    token_ids: tuple[int, ...]


class StoredBlocks:
    """The blocks that events say are cached.

    Attributes:
        groups: by layer group and hash.
    """

    def __init__(self):
        self.groups = {}

    @property
    def blocks(self):
        """Those of layer group 0 by hash."""
        return self.groups.get(0, {})

    def apply(self, batch):
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.groups.clear()
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        del self.groups[event.group_idx or 0][block_hash]
                case BlockStored():
                    self._store(event)

    def _store(self, event):
        parent, size = event.parent_block_hash, event.block_size
        blocks = self.groups.setdefault(event.group_idx or 0, {})
        assert len(event.token_ids) == len(event.block_hashes) * size
        for index, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[index * size : (index + 1) * size]
            assert block_hash not in blocks
            blocks[block_hash] = StoredBlock(parent, tuple(tokens))
            parent = block_hash


class KvEventReader:
    """A subscriber that follows a publisher as llm-d's does: it asks for the messages before its
    first one, and for those that it missed.

    Attributes:
        cached: what the events say.
        next_number: number of the next message.
        num_gaps: how often a number did not follow.
    """

    def __init__(self, address, replay_address, topic="kv@"):
        self.cached, self.next_number, self.num_gaps = StoredBlocks(), 0, 0
        self._replay_address = replay_address
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.subscribe(topic)
        self.socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    def replay(self, number, timeout_s=30.0):
        """Asks for messages from a number on; returns them as (topic, number, payload)."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self._replay_address)
            dealer.send_multipart((b"", number.to_bytes(8, "big")))
            answer = []
            while True:
                assert dealer.poll(timeout_s * 1000), "no answer"
                empty, topic, number_frame, payload = dealer.recv_multipart()
                assert empty == b""
                if not payload:
                    assert (topic, number_frame) == (b"", END)
                    return answer
                answer.append((topic, int.from_bytes(number_frame, "big"), payload))

    def catch_up(self):
        """Applies what was missed."""
        for _, number, payload in self.replay(self.next_number):
            self._apply(number, payload)

    def read(self, timeout_s=1.0):
        """Waits for a message and applies it, with those before it; returns whether one came."""
        if not self.socket.poll(timeout_s * 1000):
            return False
        _, number_frame, payload = self.socket.recv_multipart()
        number = int.from_bytes(number_frame, "big")
        if number > self.next_number:
            self.num_gaps += 1
            self.catch_up()
        if number >= self.next_number:
            self._apply(number, payload)
        return True

    def read_until(self, condition, timeout_s=30.0):
        """Reads until a condition holds. What was published while the socket was not connected
        comes with no later message, so it asks for it where none comes.
        """
        self.catch_up()
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.cached.blocks.keys()
            if not self.read(0.2):
                self.catch_up()

    def _apply(self, number, payload):
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        if number != self.next_number:
            assert isinstance(batch.events[0], AllBlocksCleared)
        self.cached.apply(batch)
        self.next_number = number + 1
