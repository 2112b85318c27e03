"""Checks that a KV store takes blocks, and that a connector hands them over."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

from baton.common.errors import ConfigurationError
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CredentialsConfig
from baton.doctor import Finding, Level
from baton.doctor.nixl_reads import why_unreadable
from kvstore.driver import ConnectorDriver, ContractError
from kvstore.layout import KvLayout
from kvstore.registry import known_stores, open_connector, open_store
from kvstore.store import (
    GetStatus,
    KvObject,
    KvStore,
    StoreFullError,
    StoreUnavailableError,
    unused_key,
)
from kvstore.url import MULTI_SCHEME, printable_url, scheme_of, split_members

__all__ = ["check_connector", "check_store"]

_STORE_TOPIC = "kv store"
_KIB, _MIB = 1 << 10, 1 << 20
# Of blocks of small and of large models. Redis has no larger value than 4 MiB, and several of them
# for a larger object.
_SIZES = {"64 KiB": 64 * _KIB, "1 MiB": _MIB, "4 MiB": 4 * _MIB, "9 MiB": 9 * _MIB}
_HEADER_BYTES = 64
_CONNECTOR_TOPIC = "kv connector"
_LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, block_size=16, head_dim=16, dtype="float32")
# Blocks of the pool.
_SAVED, _LOADED = (0, 1), (2, 3)
_LIMIT_S = 30.0
_CLEAN_UP_S = 5.0


def check_store(url: str) -> Iterator[Finding]:
    """Makes the calls of workers on each server, with objects of several sizes under new keys.

    The objects are removed. Where a server would evict others for them, it stores none.

    Args:
        url: the store's, as for `--kv-connector`; findings leave its password out.
    """
    name = printable_url(url)
    started = time.perf_counter()
    trial = _Trial()
    try:
        with closing(open_store(url, is_diagnosis=True)) as store:
            trial.run(store)
    except ConfigurationError as error:
        trial.problems.append(error.message)
    elapsed_ms = (time.perf_counter() - started) * 1000
    facts = {"url": name, "elapsed_ms": round(elapsed_ms, 2)}
    if trial.success:
        yield Finding(
            _STORE_TOPIC, Level.OK, f"{name}: {trial.success} in {elapsed_ms:.0f} ms", facts
        )
    for problem in trial.problems:
        yield Finding(_STORE_TOPIC, Level.PROBLEM, f"{name}: {problem}", facts)
    for note in trial.notes:
        yield Finding(_STORE_TOPIC, Level.NOTE, f"{name}: {note}", facts)


class _Trial:
    """Findings of the calls on one store.

    Attributes:
        problems: what does not work.
        notes: what works in part, or was not tried.
        success: what was done; empty unless all was.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.success = ""

    def run(self, store: KvStore) -> None:
        """Tries a store, server by server."""
        try:
            keys = store.diagnosis.new_keys()
        except StoreUnavailableError as error:
            self.problems.append(f"does not answer: {error}")
            return
        for server, key in keys.items():
            self._try_server(store, key, f"{server}: " if len(keys) > 1 else "")
        if not self.problems and not self.notes:
            of_servers = f" on each of {len(keys)} servers" if len(keys) > 1 else ""
            sizes = ", ".join(_SIZES)
            self.success = (
                f"looked up, wrote, read and removed an object each of {sizes}{of_servers}"
            )
        self.notes += store.diagnosis.remarks()

    def _try_server(self, store: KvStore, key: bytes, place: str) -> None:
        try:
            has_room = store.diagnosis.has_room(key, 2 * max(_SIZES.values()))
        except StoreUnavailableError as error:
            self.problems.append(f"{place}does not answer: {error}")
            return
        if not has_room:
            self.notes.append(
                f"{place}no object was stored, as it would evict others, or as the server does not "
                "tell (INFO memory)"
            )
        self._try_sizes(store, key, place, is_rehearsal=not has_room)

    def _try_sizes(self, store: KvStore, key: bytes, place: str, *, is_rehearsal: bool) -> None:
        """Tries one server with growing objects; stops at the first that fails."""
        smaller = ""
        for size, num_bytes in _SIZES.items():
            try:
                problem = (_rehearse if is_rehearsal else _try)(store, key, num_bytes)
            except StoreFullError as error:
                self.notes.append(f"{place}no object of {size} was written: {error}")
                return
            except StoreUnavailableError as error:
                problem = str(error)
            if problem:
                though = f", though those of {smaller} can" if smaller else ""
                self.problems.append(f"{place}objects of {size} cannot be used{though}: {problem}")
                return
            smaller = size


def _rehearse(store: KvStore, key: bytes, num_bytes: int) -> str:
    """Looks an absent object up, reads it, and sends what a put sends; else does as `_try`."""
    statuses = store.get_into([key], [_blank(num_bytes)])
    if statuses != [GetStatus.MISSING] or store.contains_prefix([key]):
        return "a new key was found"
    store.diagnosis.rehearse_put(key, num_bytes)
    return ""


def _try(store: KvStore, key: bytes, num_bytes: int) -> str:
    """Makes the calls of workers for one object; returns what went wrong, or an empty text.

    Raises:
        StoreUnavailableError: a call failed.
    """
    written, read = _object(secrets.token_bytes(num_bytes)), _blank(num_bytes)
    try:
        if store.contains_prefix([key]):
            return "a new key was found"
        store.put([key], [written])
        num_found = store.contains_prefix([key])
        statuses: Sequence[GetStatus] = store.get_into([key], [read])
        if num_found != 1 or statuses != [GetStatus.HIT] or read.to_bytes() != written.to_bytes():
            return "what was written was not found again"
        return "" if store.delete([key]) == 1 else "what was written could not be removed"
    except StoreUnavailableError:
        with suppress(StoreUnavailableError):
            store.delete([key])
        raise


def _blank(num_bytes: int) -> KvObject:
    return _object(bytearray(num_bytes))


def _object(value: bytes | bytearray) -> KvObject:
    return KvObject.split(memoryview(value), _HEADER_BYTES)


def check_connector(url: str) -> Iterator[Finding]:
    """Tries a store with one object, and any other connector with a hand-over of blocks.

    Of a `multi://` URL, each member is tried, and then all of them as one.

    Args:
        url: the value of `--kv-connector`; findings leave its passwords out.
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
    """Checks whether `nixl://` can read the memory of another process of this machine."""
    if reason := why_unreadable():
        text = f"blocks of other processes come by gRPC, which is slower: {reason}"
        return Finding(_CONNECTOR_TOPIC, Level.NOTE, f"nixl://: {text}", {"reads_memory": False})
    text = "nixl://: reads the memory of other processes of this machine"
    return Finding(_CONNECTOR_TOPIC, Level.OK, text, {"reads_memory": True})


def _check_handing_over(url: str) -> Finding:
    name = printable_url(url)
    started = time.perf_counter()
    try:
        problem = _hand_over(url)
    except ConfigurationError as error:
        problem = error.message
    except TimeoutError:
        problem = f"not done within {_LIMIT_S:g} s"
    except ContractError as error:
        problem = str(error)
    elapsed_ms = (time.perf_counter() - started) * 1000
    facts = {"url": name, "elapsed_ms": round(elapsed_ms, 2)}
    if problem:
        return Finding(_CONNECTOR_TOPIC, Level.PROBLEM, f"{name}: {problem}", facts)
    text = (
        f"{name}: opened it, saved {len(_SAVED)} blocks and loaded them again "
        f"within this process in {elapsed_ms:.0f} ms"
    )
    return Finding(_CONNECTOR_TOPIC, Level.OK, text, facts)


def _hand_over(url: str) -> str:
    """Saves blocks, loads them again and removes them; returns what went wrong, or nothing.

    Raises:
        ConfigurationError: the connector cannot be opened.
        ContractError: the connector broke its contract.
        TimeoutError: a job did not end in time.
    """
    import torch  # here, as stores are checked without it

    pool = torch.randn(len(_SAVED) + len(_LOADED), *_LAYOUT.block_shape)
    keys = tuple(unused_key() for _ in _SAVED)
    lease_id = secrets.token_hex(16)
    security = ClusterSecurity.from_environment(CredentialsConfig())
    opened = open_connector(url, security, is_diagnosis=True)
    with closing(ConnectorDriver(opened, pool, _LAYOUT, timeout_s=_LIMIT_S)) as driver:
        try:
            saved = driver.save(keys, _SAVED, lease_id=lease_id)
            if not saved.committed:
                return f"blocks cannot be saved ({saved.error or 'not taken'})"
            loaded = driver.load(driver.make_handoff(keys, lease_id), _LOADED)
        finally:
            with suppress(TimeoutError):
                driver.forget(keys, lease_id, _CLEAN_UP_S)
    if loaded.num_blocks < len(_LOADED):
        return f"blocks that were saved cannot be loaded ({loaded.error})"
    is_same = torch.equal(pool[list(_SAVED)], pool[list(_LOADED)])
    return "" if is_same else "blocks that were loaded are not those that were saved"
