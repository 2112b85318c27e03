"""Whether a KV connector hands blocks over, as far as one process can tell."""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from baton.doctor.finding import Finding, Level
from baton.doctor.nixl_reads import why_unreadable
from baton.doctor.stores import check_store, without_password
from baton.errors import ConfigurationError
from kvstore.connector import Connector
from kvstore.layout import KvLayout
from kvstore.registry import known_stores, open_connector
from kvstore.url import MULTI_SCHEME, scheme_of, split_members

__all__ = ["check_connector"]

_TOPIC = "kv connector"
_LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, block_size=16, head_dim=16, dtype="float32")
_SAVED, _LOADED = (0, 1), (2, 3)
"""Blocks of the pool."""
_LIMIT_S = 30.0
_CLEAN_UP_S = 5.0


def check_connector(url: str) -> Iterator[Finding]:
    """Tries a store by itself, and has another connector hand blocks over to this process.

    Of several connectors in one URL each is tried, and then all of them as one.

    Args:
        url: as for `--kv-connector`; its passwords are not told.
    """
    if scheme_of(url) in known_stores():
        yield from check_store(url)
        return
    if scheme_of(url) == MULTI_SCHEME:
        for member in split_members(url):
            yield from check_connector(member)
    finding = _check_handing_over(url)
    yield finding
    if scheme_of(url) == "nixl" and finding.level is Level.OK:
        yield _check_reads()


def _check_reads() -> Finding:
    """How blocks of another process of this machine would come by `nixl://`."""
    if reason := why_unreadable():
        text = f"blocks of other processes come by gRPC, which is slower: {reason}"
        return Finding(_TOPIC, Level.NOTE, f"nixl://: {text}", {"reads_memory": False})
    text = "nixl://: reads the memory of other processes of this machine"
    return Finding(_TOPIC, Level.OK, text, {"reads_memory": True})


def _check_handing_over(url: str) -> Finding:
    name = without_password(url)
    started = time.perf_counter()
    try:
        problem = _try(open_connector(url))
    except ConfigurationError as error:
        problem = error.message
    elapsed_ms = (time.perf_counter() - started) * 1000
    facts = {"url": name, "elapsed_ms": round(elapsed_ms, 2)}
    if problem:
        return Finding(_TOPIC, Level.PROBLEM, f"{name}: {problem}", facts)
    text = (
        f"{name}: opened it, saved {len(_SAVED)} blocks and loaded them again "
        f"within this process in {elapsed_ms:.0f} ms"
    )
    return Finding(_TOPIC, Level.OK, text, facts)


def _try(connector: Connector) -> str:
    """What went wrong; empty for nothing. Closes the connector."""
    tiny = _TinyEngine(connector)
    try:
        tiny.open()
        return tiny.hand_over()
    except TimeoutError:
        return f"not done within {_LIMIT_S:g} s"
    finally:
        tiny.close()


class _TinyEngine:
    """Drives both halves of a connector over a pool of four blocks."""

    def __init__(self, connector: Connector) -> None:
        self._scheduler, self._worker = connector
        num_blocks = len(_SAVED) + len(_LOADED)
        self._pool = torch.randn(num_blocks, *_LAYOUT.block_shape)
        self._woken = threading.Event()

    def open(self) -> None:
        """Gives the connector its pool."""
        self._worker.set_waker(self._woken.set)
        self._worker.register_pool(self._pool, _LAYOUT)

    def hand_over(self) -> str:
        """Saves blocks and loads them, and removes them; returns what went wrong."""
        keys = tuple(secrets.token_bytes(32) for _ in _SAVED)
        lease_id = secrets.token_hex(16)
        try:
            return self._hand_over(keys, lease_id)
        finally:
            self._clean_up(keys, lease_id)

    def _hand_over(self, keys: tuple[bytes, ...], lease_id: str) -> str:
        saved = self._result_of(self._scheduler.save(keys, _SAVED, lease_id=lease_id), _LIMIT_S)
        if not saved.committed:
            return f"blocks cannot be saved ({saved.error or 'not taken'})"
        num_tokens = len(_SAVED) * _LAYOUT.block_size
        handoff = self._scheduler.make_handoff(lease_id, bytes(32), keys, num_tokens)
        loaded = self._result_of(self._scheduler.load(keys, _LOADED, handoff), _LIMIT_S)
        if loaded.num_blocks < len(_LOADED):
            return f"blocks that were saved cannot be loaded ({loaded.error})"
        is_same = torch.equal(self._pool[list(_SAVED)], self._pool[list(_LOADED)])
        return "" if is_same else "blocks that were loaded are not those that were saved"

    def close(self) -> None:
        """Closes the connector."""
        self._worker.close()

    def _clean_up(self, keys: tuple[bytes, ...], lease_id: str) -> None:
        """Leaves nothing behind: a look-up is answered after what was deleted before it."""
        self._scheduler.delete(keys)
        self._scheduler.end_lease(lease_id)
        self._start()
        with suppress(TimeoutError):
            self._result_of(self._scheduler.lookup(keys), _CLEAN_UP_S)

    def _start(self) -> None:
        if work := self._scheduler.build_work():
            self._worker.start(work)

    def _result_of(self, job_id: int, limit_s: float) -> Any:
        """A job's `LookupResult`, `LoadResult` or `SaveResult`.

        Raises:
            TimeoutError: it did not come in time.
        """
        give_up_at = time.monotonic() + limit_s
        while (remaining_s := give_up_at - time.monotonic()) > 0:
            self._start()
            results = self._scheduler.update(self._worker.poll())
            ended: list[Any] = [*results.lookups, *results.loads, *results.saves]
            for result in ended:
                if result.job_id == job_id:
                    return result
            self._woken.wait(min(0.1, remaining_s))
            self._woken.clear()
        raise TimeoutError
