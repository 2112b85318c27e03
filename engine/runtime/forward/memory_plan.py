"""`MemoryPlan`: what a worker needs of the memory that its container may use.

The system kills a process above the limit, in the middle of its requests, so what fits is computed
at the start (`engine.runtime.launch.worker_plan`):

    limit = weights + process + step + transfers + swapped KV + KV store + KV cache

The KV cache gets what the others leave, up to its default size. Nothing is planned without a limit.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from baton.common.container_limits import MEMORY_REMEDY, WORKER_NEEDS, LimitsShare, mebibytes
from baton.common.errors import ConfigurationError
from baton.common.machine_limits import read_memory

__all__ = ["MemoryPlan", "check_weights"]

_FLAGS_OF_PARTS = {
    "swapped KV": "--swap-space",
    "KV store": "max_bytes of --kv-connector",
}
_FOLLOWED_SHARE = 8
"""A store's default bound grows by less than this part of what is added to the limit."""

logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A worker's part of a limit of memory, in bytes, and what it needs besides its KV cache.

    Attributes:
        limit: the container's limit.
        share: the worker's share of it.
        parts: what it needs, by name.
        store_follows_limit: whether the KV store takes more under a higher limit.
    """

    limit: int
    share: LimitsShare
    parts: Mapping[str, int]
    store_follows_limit: bool = False

    @property
    def left(self) -> int:
        """Bytes that remain for the KV cache."""
        return max(0, self.share.num_bytes(self.limit) - sum(self.parts.values()))

    @property
    def lowered_by(self) -> list[str]:
        """The flags that set the size of a part."""
        return [flag for part, flag in _FLAGS_OF_PARTS.items() if self.parts.get(part)]

    def check(self, pool_bytes: int, remedy: str) -> None:
        """Checks that a KV cache fits.

        Args:
            pool_bytes: its size.
            remedy: what to do instead of raising the limit; empty if nothing else helps.

        Raises:
            ConfigurationError: it does not; has all numbers.
        """
        needed = sum(self.parts.values()) + pool_bytes
        if needed <= self.share.num_bytes(self.limit):
            return
        whole = self.share.other_bytes + needed * self.share.num_workers
        if self.store_follows_limit:
            whole += (whole - self.limit) // _FOLLOWED_SHARE
        raise ConfigurationError(
            f"the memory limit of this container is {mebibytes(self.limit)}, and "
            f"{mebibytes(whole)} are needed: {self._described(pool_bytes)}; {MEMORY_REMEDY}"
            f"{f', or {remedy}' if remedy else ''}"
        )

    def log(self, pool_bytes: int) -> None:
        """Logs the plan in a line."""
        logger.info(
            "memory: of a limit of %s: %s", mebibytes(self.limit), self._described(pool_bytes)
        )

    def _described(self, pool_bytes: int) -> str:
        parts = {**self.parts, "KV cache": pool_bytes}
        text = ", ".join(f"{name} {mebibytes(size)}" for name, size in parts.items() if size)
        if self.share.num_workers == 1:
            return text
        others = mebibytes(self.share.other_bytes)
        return f"{text}, for each of {self.share.num_workers} processes, and others {others}"


def check_weights(name: str, num_bytes: int, *, is_shared: bool) -> None:
    """Checks, before a model is loaded, that its weights fit.

    Args:
        name: of the model.
        num_bytes: of its weights.
        is_shared: whether the workers of the container share them.

    Raises:
        ConfigurationError: they do not; has the numbers.
    """
    limit = read_memory().limit
    if limit is None:
        return
    share = LimitsShare.from_environment()
    weights = num_bytes // share.num_workers if is_shared else num_bytes
    parts = {f"weights of {name}": weights, "process": WORKER_NEEDS.num_bytes}
    MemoryPlan(limit, share, parts).check(0, "load a smaller model")
