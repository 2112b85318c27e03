"""`TinyEngine`: drives a connector over a pool of random blocks."""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.connection import Connection

import torch

from kvstore.driver import ConnectorDriver
from kvstore.layout import FP8, INT8, KvLayout
from kvstore.registry import open_connector
from kvstore.transfer_form import WHOLE, PoolShare, TransferForm

__all__ = [
    "DEADLINE_S",
    "LAYOUTS",
    "NUM_BLOCKS",
    "Prompt",
    "TinyEngine",
    "publish_and_wait",
    "random_prompt",
]

DEADLINE_S = 30.0
NUM_BLOCKS = 96
LAYOUTS = (
    KvLayout(num_layers=4, num_kv_heads=3, block_size=16, head_dim=20, dtype="float32"),
    KvLayout(
        num_layers=2, num_kv_heads=1, block_size=32, head_dim=72, dtype="bfloat16", num_parts=1
    ),
    KvLayout(num_layers=6, num_kv_heads=2, block_size=16, head_dim=128, dtype="float16"),
    KvLayout(num_layers=4, num_kv_heads=4, block_size=16, head_dim=32, dtype=FP8),
    KvLayout(num_layers=2, num_kv_heads=1, block_size=16, head_dim=6, dtype=INT8),
)

Prompt = tuple[bytes, ...]
"""A prompt's block keys."""


def random_prompt(num_blocks: int) -> Prompt:
    """Returns keys that no other prompt has."""
    return tuple(os.urandom(32) for _ in range(num_blocks))


class TinyEngine(ConnectorDriver):
    """A driver with its own pool of random bytes.

    Args:
        url: the connector's.
        layout: the shape and type of the pool's blocks.
        num_blocks: the pool's size.
        form: see `KvConnectorWorker.register_pool`.
        share: see there.
    """

    def __init__(
        self,
        url: str,
        layout: KvLayout = LAYOUTS[0],
        num_blocks: int = NUM_BLOCKS,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        pool = _random_pool(layout, num_blocks)
        super().__init__(open_connector(url), pool, layout, form, share, timeout_s=DEADLINE_S)

    @property
    def block_bytes(self) -> torch.Tensor:
        """The pool's bytes, `[num_blocks, bytes of a block]` uint8: a view."""
        raw: torch.Tensor = self.pool.view(torch.uint8).view(len(self.pool), -1)
        return raw

    def has_nothing_new(self, before: torch.Tensor) -> bool:
        """Returns whether `block_bytes` are as before, or zeroed: a failed load may zero blocks."""
        return bool((self.block_bytes.eq(before) | self.block_bytes.eq(0)).all())

    def find(self, keys: Sequence[bytes]) -> int:
        """Looks keys up until some are found: on a busy machine an answer that comes too late is 0.

        Returns:
            How many leading blocks can be loaded.
        """
        num_found = 0

        def has_found() -> bool:
            nonlocal num_found
            num_found = self.look_up(keys)
            return num_found > 0

        self.run_until(has_found, "a look-up that finds what was saved")
        return num_found

    def run_for(self, seconds: float) -> None:
        """Steps for a while."""
        end = time.monotonic() + seconds
        self.run_until(lambda: time.monotonic() >= end, "waiting")


def publish_and_wait(url: str, keys: Prompt, pipe: Connection) -> None:
    """Hands a prompt over, sends its handoff and bytes through the pipe, and steps until killed."""
    with closing(TinyEngine(url)) as engine:
        handoff = engine.hand_over(keys, range(len(keys)))
        pipe.send((handoff, engine.block_bytes[: len(keys)].numpy().tobytes()))
        while not pipe.poll(0.02):
            engine.step()


def _random_pool(layout: KvLayout, num_blocks: int) -> torch.Tensor:
    """Returns blocks of any bytes; they need not be valid numbers."""
    raw = torch.randint(0, 256, (num_blocks, layout.block_bytes), dtype=torch.uint8)
    return raw.view(getattr(torch, layout.pool_dtype)).view(num_blocks, *layout.block_shape)
