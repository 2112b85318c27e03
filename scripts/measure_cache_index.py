"""Measures the router's cache index: processor time of a look-up, and memory per block.

    python -m scripts.measure_cache_index

Replicas hold prompts of a common beginning. In the first two cases their prefixes have a few
lengths or each one its own; in the third one every replica also has blocks after a hole.
"""

import random
import statistics
import time
import tracemalloc
from hashlib import blake2b

from router.routing.cache_form import CacheForm
from router.routing.cache_index import CacheIndex

_TOKENS_PER_BLOCK = 16
_NUM_ROUNDS = 200


def _keys(num_blocks: int, prompt: int) -> list[bytes]:
    return [blake2b(b"%d %d" % (prompt, i), digest_size=32).digest() for i in range(num_blocks)]


def _fill(index: CacheIndex, num_replicas: int, keys: list[bytes], case: str) -> None:
    """Gives the replicas prefixes of a prompt, in batches as events come."""
    draw = random.Random(num_replicas)
    common = [len(keys) * part // 4 for part in range(5)]
    for number in range(num_replicas):
        cache = index.join(f"replica {number}", CacheForm(_TOKENS_PER_BLOCK, max_blocks=(2**20,)))
        cache.has_events = True
        length = draw.choice(common) if case == "few" else draw.randrange(len(keys) + 1)
        for start in range(0, length, 64):
            cache.store(
                0, keys[start : min(start + 64, length)], keys[start - 1] if start else None
            )
        if case == "holes" and length > 2:
            cache.remove(0, [keys[draw.randrange(1, length - 1)]])


def _look_up_s(num_replicas: int, num_blocks: int, case: str) -> tuple[float, float]:
    """Returns the median and the 99th percentile of a look-up's seconds."""
    index, keys = CacheIndex(), _keys(num_blocks, 0)
    _fill(index, num_replicas, keys, case)
    # Another request has other objects with the same keys, whose hashes are not known.
    times = []
    for _ in range(_NUM_ROUNDS):
        prompt = tuple(bytes(bytearray(key)) for key in keys)
        start = time.thread_time()
        index.match(prompt, num_blocks * _TOKENS_PER_BLOCK + 1)
        times.append(time.thread_time() - start)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def _bytes_per_block(num_holders: int) -> float:
    """Returns the memory of a block's entries, the key itself included."""
    num_blocks = 50_000
    tracemalloc.start()
    index = CacheIndex()
    caches = [
        index.join(f"replica {number}", CacheForm(_TOKENS_PER_BLOCK, max_blocks=(2**20,)))
        for number in range(num_holders)
    ]
    keys = _keys(num_blocks, 0)
    for cache in caches:
        for start in range(0, num_blocks, 64):
            cache.store(0, keys[start : start + 64], keys[start - 1] if start else None)
    del keys
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / num_blocks


def main() -> None:
    """Prints two tables."""
    print("look-up, ms: median and 99th percentile")
    print(f"{'replicas':>9}{'tokens':>9}{'few lengths':>18}{'all different':>18}{'holes':>18}")
    for num_replicas in (8, 64, 512):
        for num_tokens in (1_000, 10_000, 100_000):
            cells = ""
            for case in ("few", "many", "holes"):
                median, worst = _look_up_s(num_replicas, num_tokens // _TOKENS_PER_BLOCK, case)
                cells += f"{median * 1e3:9.3f}{worst * 1e3:9.3f}"
            print(f"{num_replicas:>9}{num_tokens:>9}{cells}")
    print("memory, bytes per block: by the number of its holders")
    for num_holders in (1, 2, 8):
        print(f"{num_holders:>9}{_bytes_per_block(num_holders):9.0f}")


if __name__ == "__main__":
    main()
