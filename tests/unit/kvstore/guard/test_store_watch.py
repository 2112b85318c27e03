"""`StoreWatch`: notices by itself that a store fails, works again, or is another one."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.guard import breaker, store_watch
from kvstore.guard.guarded_store import GuardedStore
from kvstore.guard.store_watch import StableIdentity, StoreWatch
from kvstore.registry import open_store
from kvstore.store import KvStore, StoreUnavailableError
from kvstore.stores.folders import folder_identity
from tests.support.kv_urls import fresh_shm_name
from tests.support.redis_deployments import ask
from tests.support.redis_server import RedisServer, await_true

KEY = b"k" * 32


@pytest.fixture
def shm_names() -> Iterator[tuple[str, str]]:
    with fresh_shm_name() as name, fresh_shm_name() as other:
        yield name, other


class Watched:
    """A store that a test takes down, and its watch."""

    def __init__(self, store: KvStore) -> None:
        self.store, self.is_down = store, threading.Event()
        self._contains_prefix = store.contains_prefix
        store.contains_prefix = self.contains_prefix
        self.guarded = GuardedStore(store, "KV store memory://")
        self.is_down.set()
        self.watch = StoreWatch(self.guarded)

    def contains_prefix(self, keys):
        if self.is_down.is_set():
            raise StoreUnavailableError("no answer")
        return self._contains_prefix(keys)


def test_a_store_is_probed_at_start_and_used_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(breaker, "_FIRST_COOLDOWN_S", 0.01)
    watched = Watched(open_store(f"memory://{tmp_path.name}"))
    with closing(watched.watch):
        text = "KV store memory:// cannot be used: no answer"
        await_true(lambda: text in caplog.text, "the probe at start")
        assert not watched.guarded.answers
        assert watched.guarded.breakers[0][1].num_open == 1
        watched.is_down.clear()
        await_true(lambda: watched.guarded.answers, "it answers again, without a request")


def test_an_outage_is_noticed_without_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_watch, "_CHECK_INTERVAL_S", 0.01)
    watched = Watched(open_store(f"memory://{tmp_path.name}"))
    with closing(watched.watch):
        watched.is_down.clear()
        await_true(lambda: watched.guarded.answers, "it answers")
        watched.is_down.set()
        await_true(lambda: not watched.guarded.answers, "the outage is noticed")


def test_a_watch_ends_while_a_call_hangs(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path.name}?timeout_s=0.05")
    may_end, hangs = threading.Event(), threading.Event()

    def hang(keys):
        hangs.set()
        may_end.wait(20)
        return 0

    store.contains_prefix = hang
    watch = StoreWatch(GuardedStore(store, "KV store memory://"))
    assert hangs.wait(20)
    began_at = time.monotonic()
    assert not watch.close()
    assert time.monotonic() - began_at < 10
    may_end.set()
    await_true(watch.close, "the call has ended")


def test_stores_have_the_identity_of_what_they_share(
    tmp_path: Path, shm_names: tuple[str, str], redis_server: RedisServer
) -> None:
    groups = [
        [f"file://{tmp_path}/a", f"file://{tmp_path}/b"],
        [f"shm://{name}?max_bytes=1MiB" for name in shm_names],
        [redis_server.url, redis_server.url.replace("/0", "/1")],
    ]
    for urls in groups:
        identities = [_identity(url) for url in (*urls, *urls)]
        assert all(len(identity) == 32 for identity in identities)
        assert identities[:2] == identities[2:]
        assert len(set(identities)) == 2


@pytest.mark.parametrize("scheme", ["file", "shm"])
def test_a_folder_that_was_removed_gets_a_new_identity(
    scheme: str, tmp_path: Path, shm_names: tuple[str, str]
) -> None:
    name, _ = shm_names
    folder = tmp_path / "kv" if scheme == "file" else Path(f"/dev/shm/baton-{name}")
    place = folder if scheme == "file" else name
    with closing(open_store(f"{scheme}://{place}?max_bytes=1MiB")) as store:
        before = store.identity()
        shutil.rmtree(folder)
        assert len(store.identity()) == 32
        assert store.identity() != before


def _identity(url: str) -> str:
    with closing(open_store(url)) as store:
        return store.identity()


def test_a_redis_that_takes_no_writes_shows_the_identity_that_it_has(
    redis_server: RedisServer,
) -> None:
    ask(redis_server, "CONFIG", "SET", "min-replicas-to-write", "1")
    assert _identity(redis_server.url) == ""
    ask(redis_server, "CONFIG", "SET", "min-replicas-to-write", "0")
    identity = _identity(redis_server.url)
    ask(redis_server, "CONFIG", "SET", "min-replicas-to-write", "1")
    assert _identity(redis_server.url) == identity != ""


def test_processes_that_ask_at_once_see_one_identity(tmp_path: Path) -> None:
    barrier, seen = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        seen.append(folder_identity(tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["identity"]


def test_an_identity_that_changes_is_unknown_until_all_have_seen_it() -> None:
    now = [0.0]
    identity = StableIdentity(lambda: now[0])
    assert identity.value == ""
    identity.update("a")
    assert identity.value == "a", "at start nothing has changed"
    for now[0], seen, value in ((5, "", "a"), (10, "b", ""), (15, "b", ""), (25, "b", "b")):
        identity.update(seen)
        assert identity.value == value
