"""`TinyEngine`: a pool of random blocks and both halves of a connector, stepped as an engine does.

It keeps the engine's side of the contract of `kvstore.connector`, and checks
the connector's: one result for each job, and nothing released that was not held.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

from kvstore.handoff import KvHandoff
from kvstore.jobs import LoadResult, SaveResult
from kvstore.layout import FP8, KvLayout
from kvstore.registry import open_connector

__all__ = ["DEADLINE_S", "LAYOUTS", "NUM_BLOCKS", "Prompt", "TinyEngine", "random_prompt"]

DEADLINE_S = 30.0
NUM_BLOCKS = 96
LAYOUTS = (
    KvLayout(num_layers=4, num_kv_heads=3, block_size=16, head_dim=20, dtype="float32"),
    KvLayout(num_layers=2, num_kv_heads=1, block_size=32, head_dim=64, dtype="bfloat16"),
    KvLayout(num_layers=6, num_kv_heads=2, block_size=16, head_dim=128, dtype="float16"),
    KvLayout(num_layers=4, num_kv_heads=4, block_size=16, head_dim=32, dtype=FP8),
)

_NAMESPACE = b"conformance".ljust(32)
_POLL_S = 0.02

Prompt = tuple[bytes, ...]
"""A prompt's block keys."""


def random_prompt(num_blocks: int) -> Prompt:
    """Keys that nobody has used."""
    return tuple(os.urandom(32) for _ in range(num_blocks))


class TinyEngine:
    """An engine's side of a connector.

    Args:
        url: the connector's.
        layout: of its blocks.
        num_blocks: of its pool.

    Attributes:
        pool: `[num_blocks, *layout.block_shape]`, random.
        saves: results by job.
        loads: results by job.
        lookups: answers by job.
        released: save jobs whose blocks are the engine's again.
        woken: set when the connector has news.
    """

    def __init__(
        self, url: str, layout: KvLayout = LAYOUTS[0], num_blocks: int = NUM_BLOCKS
    ) -> None:
        self.layout = layout
        self.pool = _random_pool(layout, num_blocks)
        self.saves: dict[int, SaveResult] = {}
        self.loads: dict[int, LoadResult] = {}
        self.lookups: dict[int, int] = {}
        self.released: list[int] = []
        self.woken = threading.Event()
        self.scheduler, self.worker = open_connector(url)
        self.worker.register_pool(self.pool, layout)
        self.worker.set_waker(self.woken.set)

    @property
    def block_bytes(self) -> torch.Tensor:
        """The pool's bytes, `[num_blocks, bytes of a block]` uint8: a view."""
        return self.pool.view(torch.uint8).view(len(self.pool), -1)

    def has_nothing_new(self, before: torch.Tensor) -> bool:
        """Whether `block_bytes` are as before. What could not be used of a load may be zeroed."""
        return bool((self.block_bytes.eq(before) | self.block_bytes.eq(0)).all())

    def step(self) -> None:
        """Takes in what has ended, and then starts what was asked for, as engines do."""
        self._take_in()
        if work := self.scheduler.build_work():
            self.worker.start(work)

    def _take_in(self) -> None:
        results = self.scheduler.update(self.worker.poll())
        for answer in results.lookups:
            self.lookups[answer.job_id] = answer.num_blocks
        for loaded in results.loads:
            assert loaded.job_id not in self.loads, "a load has one result"
            self.loads[loaded.job_id] = loaded
        for saved in results.saves:
            assert saved.job_id not in self.saves, "a save has one result"
            self.saves[saved.job_id] = saved
        for job_id in results.released:
            assert self.saves[job_id].is_held, "only what is held is released"
            assert job_id not in self.released, "it is released once"
            self.released.append(job_id)

    def run_until(self, is_over: Callable[[], bool], what: str) -> None:
        """Steps until something has happened.

        Raises:
            AssertionError: it did not within `DEADLINE_S`.
        """
        give_up_at = time.monotonic() + DEADLINE_S
        self.step()
        while not is_over():
            assert time.monotonic() < give_up_at, f"{what} takes longer than {DEADLINE_S:g} s"
            self.woken.wait(_POLL_S)
            self.woken.clear()
            self.step()

    def run_for(self, seconds: float) -> None:
        """Steps for a while."""
        end = time.monotonic() + seconds
        self.run_until(lambda: time.monotonic() >= end, "waiting")

    def start_save(
        self, keys: Prompt, block_ids: Sequence[int], num_tail_tokens: int = 0, lease_id: str = ""
    ) -> int:
        """Begins to publish blocks for a lease; returns the job."""
        return self.scheduler.save(keys, block_ids, num_tail_tokens, lease_id=lease_id)

    def save(
        self, keys: Prompt, block_ids: Sequence[int], num_tail_tokens: int = 0, lease_id: str = ""
    ) -> SaveResult:
        """Publishes blocks for a lease."""
        job_id = self.start_save(keys, block_ids, num_tail_tokens, lease_id)
        self.run_until(lambda: job_id in self.saves, "a save")
        return self.saves[job_id]

    def make_handoff(self, keys: Prompt, lease_id: str, num_tail_tokens: int = 0) -> KvHandoff:
        """The handoff of a prompt that has been saved for it."""
        num_full = len(keys) - bool(num_tail_tokens)
        num_tokens = num_full * self.layout.block_size + num_tail_tokens
        return self.scheduler.make_handoff(lease_id, _NAMESPACE, keys, num_tokens)

    def publish(
        self, keys: Prompt, block_ids: Sequence[int], num_tail_tokens: int = 0
    ) -> KvHandoff:
        """Saves a prompt, and hands it over."""
        lease_id = os.urandom(16).hex()
        result = self.save(keys, block_ids, num_tail_tokens, lease_id)
        assert result.committed, "the blocks cannot be saved"
        self.scheduler.offer(lease_id)
        self.step()
        return self.make_handoff(keys, lease_id, num_tail_tokens)

    def start_load(self, handoff: KvHandoff, block_ids: Sequence[int]) -> int:
        """Begins to load the first blocks of a handoff; returns the job."""
        keys = handoff.block_keys[: len(block_ids)]
        return self.scheduler.load(keys, block_ids, handoff)

    def load(self, handoff: KvHandoff, block_ids: Sequence[int]) -> LoadResult:
        """Loads the first blocks of a handoff."""
        job_id = self.start_load(handoff, block_ids)
        self.run_until(lambda: job_id in self.loads, "a load")
        return self.loads[job_id]

    def look_up(self, keys: Prompt) -> int:
        """How many leading blocks can be loaded."""
        job_id = self.scheduler.lookup(keys)
        self.run_until(lambda: self.scheduler.num_found(job_id) is not None, "a look-up")
        num_found = self.scheduler.num_found(job_id)
        self.scheduler.forget_lookup(job_id)
        assert num_found is not None
        return num_found

    def close(self) -> None:
        """Closes the connector, as an engine that goes away does."""
        self.worker.close()


def _random_pool(layout: KvLayout, num_blocks: int) -> torch.Tensor:
    """Any bytes at all: what is moved need not be numbers."""
    raw = torch.randint(0, 256, (num_blocks, layout.block_bytes), dtype=torch.uint8)
    return raw.view(getattr(torch, layout.pool_dtype)).view(num_blocks, *layout.block_shape)
