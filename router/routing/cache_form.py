"""`CacheForm`: how a worker's prefix cache is cut, and which blocks a prefix needs. Pure."""

from dataclasses import dataclass, replace

from baton.v1 import worker_pb2

__all__ = ["CacheForm"]


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The form of one worker's prefix cache.

    Attributes:
        tokens_per_block: tokens in a block of its pool.
        keys_per_block: block keys that such a block covers; its own key is the last of them.
        windows: per layer group, how many blocks before the first token after a prefix this token
            needs; None for all of them. States of recurrent layers are needed at the last block.
        state_group: number of the layer group of states; None without one.
        max_blocks: per layer group, the most blocks that it can hold.
    """

    tokens_per_block: int = 16
    keys_per_block: int = 1
    windows: tuple[int | None, ...] = (None,)
    state_group: int | None = None
    max_blocks: tuple[int, ...] = (2**32,)

    @property
    def without_sizes(self) -> "CacheForm":
        """The form without `max_blocks`, which caches of workers with equal blocks share."""
        return replace(self, max_blocks=())

    @classmethod
    def from_info(cls, info: worker_pb2.GetInfoResponse) -> "CacheForm | None":
        """Returns the form of a worker's prefix cache; None if it has none.

        A worker of an earlier version does not describe its layer groups: it has one without a
        window, as far as is known.
        """
        if info.HasField("caches_prefixes") and not info.caches_prefixes:
            return None
        groups = info.cache_groups
        state = worker_pb2.CacheGroup.KIND_STATE
        return cls(
            tokens_per_block=max(info.pool_block_size, 1),
            keys_per_block=max(info.pool_block_size // max(info.block_size, 1), 1),
            windows=tuple(_window(group) for group in groups) or (None,),
            state_group=next((i for i, group in enumerate(groups) if group.kind == state), None),
            max_blocks=tuple(group.max_blocks for group in groups) or (info.num_blocks,),
        )


def _window(group: worker_pb2.CacheGroup) -> int | None:
    """Blocks that a layer group needs before the first token after a prefix; None for all."""
    if group.kind == worker_pb2.CacheGroup.KIND_WINDOW:
        return group.window_blocks
    return 1 if group.kind == worker_pb2.CacheGroup.KIND_STATE else None
