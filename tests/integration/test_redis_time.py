"""Calls of the redis store end in time whatever a server sends; late bytes affect no other call."""

import os
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import pytest

from kvstore.conformance.objects import as_object, blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from tests.support.redis_server import await_true

_TIMEOUT_S = 0.4
_SLACK_S = 4.0  # a busy machine; a call whose timeout restarts with every byte takes minutes
_TRICKLE_S = 0.02
_OK = b"+OK\r\n"
_ONE = b":1\r\n"
_OLD = b"$3\r\nold\r\n"


class ScriptedServer:
    """A server that answers each command by its name until the script has no more answers.

    Args:
        greeting: sent to each new connection, a byte at a time.
        answers: by command name, the replies to a connection's first, second and so on such
            command. The part after a `|` is sent a byte at a time.

    Attributes:
        port: on 127.0.0.1.
        num_connections: accepted so far.
    """

    def __init__(self, greeting: bytes = b"", **answers: list[bytes]) -> None:
        self._greeting = greeting
        self._answers = {f"{name}\r\n".encode(): texts for name, texts in answers.items()}
        self._is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Ends all threads. The store must have been closed."""
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        answers = {name: iter(texts) for name, texts in self._answers.items()}
        with connection, connection.makefile("rb") as lines:
            try:
                self._trickle(connection, self._greeting)
                for line in lines:
                    at_once, _, slowly = next(answers.get(line, iter(())), b"").partition(b"|")
                    connection.sendall(at_once)
                    self._trickle(connection, slowly)
            except OSError:
                """The store has closed its end."""

    def _trickle(self, connection: socket.socket, text: bytes) -> None:
        for byte in text:
            if self._is_over.wait(_TRICKLE_S):
                return
            connection.sendall(bytes([byte]))


@contextmanager
def scripted_store(scheme="redis", login="", path="", **script):
    """Yields a store and its server, which follows the script."""
    with ExitStack() as stack:
        server = stack.enter_context(closing(ScriptedServer(**script)))
        url = f"{scheme}://{login}127.0.0.1:{server.port}{path}?timeout_s={_TIMEOUT_S}"
        yield stack.enter_context(closing(open_store(url))), server


def assert_unavailable_in_time(call):
    started_s = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        call()
    assert time.monotonic() - started_s < _TIMEOUT_S + _SLACK_S


def get_call(store, num_bytes=100_000):
    return lambda: store.get_into(random_keys(1), [blank(num_bytes)])


_MUCH = b"x" * 1000


@pytest.mark.parametrize(
    ("login", "script"),
    [
        pytest.param(
            "",
            {"CLIENT": [_OK, _OK], "PEXPIRE": [b":1\r\n"], "GET": [b"|$100000\r\n" + _MUCH]},
            id="value",
        ),
        pytest.param(
            "",
            {"CLIENT": [_OK, _OK], "PEXPIRE": [b":1\r\n"], "GET": [b"|$70000\r\n" + _MUCH]},
            id="another",
        ),
        pytest.param(
            "", {"CLIENT": [_OK, _OK], "PEXPIRE": [b":1\r\n"], "GET": [b"|+" + _MUCH]}, id="line"
        ),
        pytest.param("", {"CLIENT": [b"|+" + _MUCH]}, id="handshake"),
        pytest.param("user:password@", {"AUTH": [b"|+" + _MUCH]}, id="log-in"),
    ],
)
def test_a_call_to_a_trickling_server_fails_in_time(login, script):
    with scripted_store(login=login, **script) as (store, _):
        assert_unavailable_in_time(get_call(store))


@pytest.mark.parametrize(
    ("scheme", "path", "script"),
    [
        ("rediss", "", {"greeting": b"\x16\x03\x03\x3f" + _MUCH}),
        ("redis+cluster", "", {"CLIENT": [_OK, _OK], "SLOTS": [b"|*" + b"1" * 1000]}),
        ("redis+sentinel", "/kv", {"CLIENT": [_OK, _OK], "MASTERS": [b"|*" + b"1" * 1000]}),
    ],
)
def test_a_call_to_a_trickling_deployment_of_another_kind_fails_in_time(scheme, path, script):
    with scripted_store(scheme, path=path, **script) as (store, _):
        assert_unavailable_in_time(get_call(store))


@pytest.mark.parametrize(
    "reply", [b"!\r\n", b"$x\r\n", b"*1\r\n" * 50, b"$-7\r\n!", b"-LOADING wait\r\n", b":1"]
)
def test_a_server_with_malformed_replies_is_unavailable(reply):
    keys = random_keys(2)
    with scripted_store(CLIENT=[_OK, _OK], PEXPIRE=[_ONE] * 2, GET=[reply]) as (store, _):
        assert_unavailable_in_time(lambda: store.get_into(keys, [blank(9), blank(9)]))


def test_a_reply_that_a_call_left_unread_does_not_answer_the_next_call():
    with scripted_store(CLIENT=[_OK, _OK], PEXPIRE=[_ONE] * 2, GET=[_OLD]) as (store, server):
        assert_unavailable_in_time(lambda: store.get_into(random_keys(2), [blank(3)] * 2))
        assert server.num_connections == 1
        assert read(store, random_keys(1)[0], 3) == b"old"
        assert server.num_connections == 2


def test_an_unrequested_reply_does_not_answer_the_next_call():
    with scripted_store(CLIENT=[_OK, _OK], PEXPIRE=[_ONE] * 2, GET=[_OLD + _OLD]) as (
        store,
        server,
    ):
        assert read(store, random_keys(1)[0], 3) == b"old"
        assert read(store, random_keys(1)[0], 3) == b"old"
        assert server.num_connections == 2


def test_the_wait_for_a_connection_counts_towards_the_timeout(redis_server):
    url = f"{redis_server.url}?timeout_s={_TIMEOUT_S}&max_connections=1"
    with closing(open_store(url)) as store:
        redis_server.pause()
        threads = [
            threading.Thread(target=assert_unavailable_in_time, args=(get_call(store),))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        redis_server.resume()
        assert not any(thread.is_alive() for thread in threads)
        await_true(lambda: read(store, bytes(32), 3) is GetStatus.MISSING, "the store works")


def test_a_connection_serves_all_kinds_of_calls_one_after_another(redis_server):
    """Error replies leave the connection usable."""
    keys = random_keys(2)
    value = os.urandom(9_000_000)
    with closing(open_store(f"{redis_server.url}?timeout_s=30&max_connections=1")) as store:
        for _ in range(3):
            store.put(keys, [filled(1, 100), as_object(value)])
            assert read(store, keys[1], 100) is GetStatus.WRONG_SIZE
            assert read(store, keys[0], 9_000_000) is GetStatus.WRONG_SIZE
            assert read(store, keys[1], 9_000_000) == value
            assert store.contains_prefix(keys) == 2
            assert store.delete(keys) == 2
