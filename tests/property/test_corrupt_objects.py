"""Ten thousand spoiled objects of each store, and blocks spoiled between peers: none is used."""

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from redis import Redis

from kvstore.conformance.engines import NUM_BLOCKS, TinyEngine, random_prompt
from kvstore.jobs import cause_of
from kvstore.layout import KvLayout
from kvstore.peer import service
from kvstore.peer.nixl.transport import NixlTransport
from tests.support.kv_urls import fresh_shm_name
from tests.support.nixl_remote import needs_process_vm_readv
from tests.support.redis_server import RedisServer
from tests.support.shm_arena import needs_shared_memory
from tests.support.spoiled_objects import (
    RawArenaObjects,
    RawFileObjects,
    RawMemoryObjects,
    RawObjects,
    RawRedisObjects,
    spoil,
    spoil_in_place,
)

SMALL = KvLayout(num_layers=2, num_kv_heads=1, block_size=4, head_dim=16, dtype="float32")
# Sixteen objects per call.
LARGE = KvLayout(num_layers=4, num_kv_heads=4, block_size=16, head_dim=64, dtype="float32")
POISON = 0xA5
NUM_SPOILED = {"memory": 10_000, "shm": 3_000, "file": 3_000, "redis": 3_000}
NUM_SPOILED_LARGE = 500
NUM_SPOILED_ON_THE_WIRE = 400


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_engine(closing: ExitStack, url: str, layout: KvLayout) -> TinyEngine:
    engine = TinyEngine(url, layout)
    closing.callback(engine.close)
    return engine


@dataclass
class Load:
    """The blocks of one load: intact ones, a spoiled one, and maybe one behind it.

    Attributes:
        blocks: indices of the keys, which are also the block ids in both pools.
        num_intact: leading blocks that are not spoiled.
    """

    blocks: range
    num_intact: int


def cut_into_loads(rng: random.Random) -> list[Load]:
    """Divides all blocks of a pool into loads."""
    loads, first = [], 0
    while first < NUM_BLOCKS:
        num_intact = rng.choice((0, 0, 0, 1, 2))
        end = min(NUM_BLOCKS, first + num_intact + rng.choice((1, 1, 2)))
        loads.append(Load(range(first, end), min(num_intact, end - first - 1)))
        first = end
    return loads


def check_load(reader: TinyEngine, publisher: TinyEngine, load: Load, job: int) -> None:
    """Checks that intact blocks are unchanged, and all others were not written or are zeroed."""
    result = reader.loads[job]
    first, end = load.blocks[0], load.blocks[0] + load.num_intact
    assert (result.num_blocks, cause_of(result.error)) == (load.num_intact, "corrupt")
    assert torch.equal(reader.block_bytes[first:end], publisher.block_bytes[first:end])
    rest = reader.block_bytes[end : load.blocks[-1] + 1]
    assert (rest.eq(POISON) | rest.eq(0)).all()


def open_raw_objects(
    kind: str, closing: ExitStack, folder: Path, redis_server: RedisServer
) -> tuple[str, Callable[[], RawObjects]]:
    """Returns a store's URL, and a function that gives access to its objects once it is open."""
    name = closing.enter_context(fresh_shm_name())
    if kind == "redis":
        client = closing.enter_context(Redis(port=redis_server.port))
        return f"{redis_server.url}?timeout_s=20", lambda: RawRedisObjects(client)
    if kind == "memory":
        return f"memory://{name}?lease_s=0", lambda: RawMemoryObjects(name)
    options = "lease_s=0&max_bytes=128MiB&timeout_s=20"
    if kind == "shm":
        return f"shm://{name}?{options}", lambda: RawArenaObjects(Path(f"/dev/shm/baton-{name}"))
    return f"file://{folder}/kv?{options}", lambda: RawFileObjects(folder / "kv")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "memory" else pytest.mark.slow)
        for kind in NUM_SPOILED
    ],
)
def test_none_of_thousands_of_spoiled_objects_is_used(
    closing: ExitStack, tmp_path: Path, redis_server: RedisServer, kind: str
) -> None:
    url, open_objects = open_raw_objects(kind, closing, tmp_path, redis_server)
    check_store(closing, url, open_objects, SMALL, NUM_SPOILED[kind])


@pytest.mark.parametrize("kind", ["memory", "shm", "file"])
def test_no_large_spoiled_object_is_used(
    closing: ExitStack, tmp_path: Path, redis_server: RedisServer, kind: str
) -> None:
    if kind == "shm":
        needs_shared_memory(128 << 20)
    url, open_objects = open_raw_objects(kind, closing, tmp_path, redis_server)
    check_store(closing, url, open_objects, LARGE, NUM_SPOILED_LARGE)


def check_store(
    closing: ExitStack,
    url: str,
    open_objects: Callable[[], RawObjects],
    layout: KvLayout,
    num_spoiled: int,
) -> None:
    """Spoils objects of a store until `num_spoiled` were requested; checks every load."""
    publisher, reader = (open_engine(closing, url, layout) for _ in range(2))
    raw, rng = open_objects(), random.Random(11)
    others = [bytes(rng.randbytes(layout.block_bytes + 64))]
    while num_spoiled > 0:
        keys = random_prompt(NUM_BLOCKS)
        loads = cut_into_loads(rng)
        assert publisher.save(keys, range(NUM_BLOCKS)).committed
        for load in loads:
            others = [
                *others[-7:],
                spoil_one(raw, keys[load.blocks[load.num_intact]], rng, others),
            ]
        reader.block_bytes.fill_(POISON)
        jobs = [start_load(reader, keys, load) for load in loads]
        reader.run_until(lambda jobs=jobs: all(job in reader.loads for job in jobs), "loads")
        for load, job in zip(loads, jobs, strict=True):
            check_load(reader, publisher, load, job)
            assert raw.read(keys[load.blocks[load.num_intact]]) is None, (
                "the spoiled object is still there"
            )
        num_spoiled -= len(loads)


def spoil_one(raw: RawObjects, key: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Spoils an object; returns its original value."""
    value = raw.read(key)
    assert value is not None
    raw.write(key, spoil(value, rng, others))
    return value


def start_load(reader: TinyEngine, keys: tuple[bytes, ...], load: Load) -> int:
    return reader.scheduler.load([keys[block] for block in load.blocks], list(load.blocks))


# Between peers.


class Spoiler:
    """Spoils values in transit; keeps some earlier ones to replace later values with them."""

    def __init__(self) -> None:
        self.num_spoiled = 0
        self._lots = random.Random(12)
        self._seen: dict[int, list[bytes]] = {}  # values by their length

    def spoil(self, value: bytes) -> bytes:
        others = self._seen.setdefault(len(value), [bytes(len(value))])
        spoiled = spoil_in_place(value, self._lots, others)
        self._seen[len(value)] = [*others[-3:], value]
        self.num_spoiled += 1
        return spoiled

    def spoil_memory(self, address: int, num_bytes: int) -> None:
        memory = (ctypes.c_char * num_bytes).from_address(address)
        memory.raw = self.spoil(memory.raw)


def spoil_messages(monkeypatch: pytest.MonkeyPatch, spoiler: Spoiler) -> None:
    """Spoils the messages in which `grpc://` sends blocks, and truncates some of them."""
    to_message = service.to_message

    def spoiled(chunk):
        whole = b"".join(chunk)
        data = whole[:-100] if spoiler.num_spoiled % 4 == 0 else whole
        return to_message([memoryview(spoiler.spoil(data))])

    monkeypatch.setattr(service, "to_message", spoiled)


def spoil_slots(monkeypatch: pytest.MonkeyPatch, spoiler: Spoiler) -> None:
    """Spoils the slots that a read of `nixl://` has filled."""
    read = NixlTransport.read

    def spoiled(self, peer_id, sources, targets, timeout_s):
        read(self, peer_id, sources, targets, timeout_s)
        for address, num_bytes, _ in targets.tolist():
            spoiler.spoil_memory(address, num_bytes)

    monkeypatch.setattr(NixlTransport, "read", spoiled)


@pytest.mark.parametrize("url", ["grpc://", "nixl://"])
def test_no_block_spoiled_on_the_wire_is_used(
    monkeypatch: pytest.MonkeyPatch, closing: ExitStack, url: str
) -> None:
    if url == "nixl://":
        needs_process_vm_readv()
    publisher, reader = (open_engine(closing, f"{url}?timeout_s=30", SMALL) for _ in range(2))
    keys = random_prompt(NUM_BLOCKS)
    handoff = publisher.hand_over(keys, range(NUM_BLOCKS))
    assert reader.load(handoff, range(NUM_BLOCKS)).num_blocks == NUM_BLOCKS

    spoiler = Spoiler()
    (spoil_messages if url == "grpc://" else spoil_slots)(monkeypatch, spoiler)
    while spoiler.num_spoiled < NUM_SPOILED_ON_THE_WIRE:
        reader.block_bytes.fill_(POISON)
        jobs = [reader.scheduler.load([key], [block], handoff) for block, key in enumerate(keys)]
        reader.run_until(lambda jobs=jobs: all(job in reader.loads for job in jobs), "loads")
        results = [reader.loads[job] for job in jobs]
        assert {result.num_blocks for result in results} == {0}
        assert {cause_of(result.error) for result in results} <= {"corrupt", "missing"}
        assert not reader.block_bytes.any(), "refused blocks are not zeroed"

    monkeypatch.undo()
    assert reader.load(handoff, range(NUM_BLOCKS)).num_blocks == NUM_BLOCKS
    assert torch.equal(reader.block_bytes, publisher.block_bytes)
