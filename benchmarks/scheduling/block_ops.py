"""Measures block operations of the KV cache manager and of the block pool."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.manager import KvCacheManager
from engine.kv_cache.spec import KvCacheSpec
from kvstore.block_key import BlockKeyChain

__all__ = ["measure_block_ops"]

_BLOCK_SIZE = 16
_NUM_TABLES = 512
_TABLE_BLOCKS = 32
_NUM_TOKENS = _TABLE_BLOCKS * _BLOCK_SIZE
_NUM_BLOCKS = _NUM_TABLES * (_TABLE_BLOCKS + 4)
_ROUNDS = 15


def measure_block_ops() -> list[dict[str, Any]]:
    """Returns each operation's median time and rate. Every round checks the pool afterwards."""
    return [
        _summarize(name, [measure() for _ in range(_ROUNDS)]) for name, measure in _MEASURES.items()
    ]


def _summarize(name: str, rounds: list[float]) -> dict[str, Any]:
    nanoseconds = statistics.median(rounds)
    return {
        "operation": name,
        "ns": round(nanoseconds, 1),
        "per_s": round(1e9 / nanoseconds),
    }


def _time(call: Callable[[], object], count: int) -> float:
    """Returns nanoseconds per operation of a call that does `count` operations."""
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / count


def _allocate_and_release() -> float:
    pool = BlockPool(_NUM_BLOCKS)

    def run() -> None:
        for _ in range(_NUM_TABLES * _TABLE_BLOCKS):
            pool.release(pool.allocate(1))

    taken = _time(run, _NUM_TABLES * _TABLE_BLOCKS)
    pool.check()
    return taken


def _admit_and_free() -> float:
    kv = _new_manager()

    def run() -> None:
        for _ in range(_NUM_TABLES):
            kv.free(_admit(kv))

    return _checked(kv, _time(run, _NUM_TABLES * _TABLE_BLOCKS), num_held=0)


def _fork_and_free() -> float:
    kv = _new_manager()
    tables = [_admit(kv) for _ in range(_NUM_TABLES)]

    def run() -> None:
        for table in tables:
            kv.free(kv.fork(table))

    return _checked(
        kv, _time(run, _NUM_TABLES * _TABLE_BLOCKS), num_held=_NUM_TABLES * _TABLE_BLOCKS
    )


def _append_in_place() -> float:
    return _append(_NUM_TOKENS - 1, num_new=0)


def _append_at_boundary() -> float:
    return _append(_NUM_TOKENS, num_new=1)


def _append_copying() -> float:
    return _append(_NUM_TOKENS - 1, num_new=1, is_forked=True)


def _append(position: int, *, num_new: int, is_forked: bool = False) -> float:
    """Measures `can_append` and `append` for one token at `position` in every table."""
    kv = _new_manager()
    tables = [_admit(kv) for _ in range(_NUM_TABLES)]
    if is_forked:
        tables = [kv.fork(table) for table in tables]

    def run() -> None:
        for table in tables:
            if kv.can_append(table, position, position + 1):
                kv.append(table, position, position + 1)

    taken = _time(run, _NUM_TABLES)
    if len(kv.take_copies()) != (_NUM_TABLES if is_forked else 0):
        raise RuntimeError("shared blocks were not copied, or others were")
    kv.step_started(1)
    kv.step_reported(1)
    return _checked(kv, taken, num_held=_NUM_TABLES * (_TABLE_BLOCKS + num_new))


def _compute_keys() -> float:
    token_ids = list(range(_NUM_TOKENS))
    chains = [_new_chain() for _ in range(_NUM_TABLES)]

    def run() -> None:
        for chain in chains:
            chain.extend(token_ids)

    return _time(run, _NUM_TABLES * _TABLE_BLOCKS)


def _register() -> float:
    return _fill_cache()[2]


def _match() -> float:
    kv, keys, _ = _fill_cache()

    def run() -> None:
        for own_keys in keys:
            kv.match_prefix(own_keys, _NUM_TOKENS + 1)

    taken = _time(run, _NUM_TABLES * _TABLE_BLOCKS)
    if any(kv.match_prefix(own, _NUM_TOKENS + 1).num_blocks != _TABLE_BLOCKS for own in keys):
        raise RuntimeError("a cached prefix was not found")
    return taken


def _fill_cache() -> tuple[KvCacheManager, list[list[bytes]], float]:
    """Returns a cache of many prefixes, their keys, and the nanoseconds to register a block."""
    kv = _new_manager()
    tables = [_admit(kv) for _ in range(_NUM_TABLES)]
    keys = [list(_new_chain().extend(range(i, i + _NUM_TOKENS))) for i in range(_NUM_TABLES)]

    def run() -> None:
        for table, own_keys in zip(tables, keys, strict=True):
            kv.register(table, own_keys, _NUM_TOKENS)

    taken = _time(run, _NUM_TABLES * _TABLE_BLOCKS)
    for table in tables:
        kv.free(table)
    return kv, keys, _checked(kv, taken, num_held=0)


def _new_manager() -> KvCacheManager:
    return KvCacheManager(_NUM_BLOCKS, KvCacheSpec(_BLOCK_SIZE), enable_prefix_caching=True)


def _new_chain() -> BlockKeyChain:
    return BlockKeyChain(b"benchmark", _BLOCK_SIZE)


def _admit(kv: KvCacheManager) -> BlockTable:
    return kv.admit(_NUM_TOKENS, kv.match_prefix((), _NUM_TOKENS))


def _checked(kv: KvCacheManager, taken: float, *, num_held: int) -> float:
    kv.check()
    if kv.pool.num_blocks - kv.pool.num_free != num_held:
        raise RuntimeError(f"{kv.pool.num_blocks - kv.pool.num_free} blocks are held")
    return taken


_MEASURES = {
    "allocate and release a block": _allocate_and_release,
    "admit and free, per block": _admit_and_free,
    "fork and free, per block": _fork_and_free,
    "append in place": _append_in_place,
    "append at a block's boundary": _append_at_boundary,
    "append with copy on write": _append_copying,
    "key of a block": _compute_keys,
    "offer a block to the prefix cache": _register,
    "match a cached block": _match,
}
