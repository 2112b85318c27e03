"""What must be read before the CPU's caches hold nothing of what was read earlier."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Cycle", "last_level_cache_bytes", "make_sweep", "plan_cycle"]

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_BYTES = 32 << 20
_UNITS = {"K": 10, "M": 20, "G": 30}
_CACHES_PER_CYCLE = 4
"""Caches do not evict in the order of use."""
_MAX_COPIES = 256


@dataclass(frozen=True, slots=True)
class Cycle:
    """Calls that follow each other, each on a copy of its own, and then from the start.

    Attributes:
        num_copies: of the inputs.
        must_sweep: whether the copies alone would stay in cache.
    """

    num_copies: int
    must_sweep: bool


def last_level_cache_bytes(caches: Path = _CACHES) -> int:
    """The largest cache of the first core; 32 MiB where the system does not say.

    Args:
        caches: a folder per cache, as Linux has it.
    """
    sizes = [_bytes_of(path.read_text().strip()) for path in caches.glob("index*/size")]
    return max(sizes, default=_UNKNOWN_BYTES)


def plan_cycle(bytes_per_call: int, max_copies: int | None, cache_bytes: int) -> Cycle:
    """As many copies as overflow the cache, if that many can be made."""
    wanted = -(-_CACHES_PER_CYCLE * cache_bytes // bytes_per_call)
    # Two, so that no call ever follows itself.
    num_copies = min(max(2, wanted), max_copies or _MAX_COPIES, _MAX_COPIES)
    return Cycle(num_copies, must_sweep=num_copies < wanted)


def make_sweep(cache_bytes: int) -> Callable[[], object]:
    """A function that reads enough for everything else to leave the cache."""
    return torch.ones(_CACHES_PER_CYCLE * cache_bytes // 4).sum


def _bytes_of(size: str) -> int:
    """Of a size such as 32768K."""
    return int(size.rstrip("KMG")) << _UNITS.get(size[-1], 0)
