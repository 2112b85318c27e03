"""Redis replies are parsed correctly however the network fragments them."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import ConnectionError as RedisConnectionError
from redis import InvalidResponse, ResponseError

from kvstore.conformance.objects import as_object
from kvstore.stores.redis.reply import ReplyReader

_READ_BYTES = 64
_LINES = st.binary(max_size=20).filter(lambda text: b"\r" not in text and b"\n" not in text)
_SCALARS = st.none() | st.integers(-(1 << 40), 1 << 40) | st.binary(max_size=300)
_REPLIES = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
_PIECES = st.lists(st.integers(1, 100), min_size=1, max_size=20)


@dataclass
class FragmentingSocket:
    """Delivers its data in pieces of `sizes`, used cyclically, and then ends."""

    data: bytes
    sizes: list[int] = field(default_factory=lambda: [1 << 20])
    num_pieces: int = 0

    def settimeout(self, seconds):
        assert seconds > 0

    def recv_into(self, view):
        num_bytes = min(self.sizes[self.num_pieces % len(self.sizes)], len(view), len(self.data))
        self.num_pieces += 1
        view[:num_bytes], self.data = self.data[:num_bytes], self.data[num_bytes:]
        return num_bytes


def reader_of(socket):
    reader = ReplyReader(socket_read_size=_READ_BYTES)
    reader.on_connect(SimpleNamespace(socket=socket, left_s=lambda: math.inf))
    return reader


def encoded(reply):
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))


@given(st.lists(_REPLIES, max_size=8), _PIECES)
def test_replies_are_read_back(replies, sizes):
    reader = reader_of(FragmentingSocket(b"".join(map(encoded, replies)), sizes))
    assert [reader.read_response() for _ in replies] == replies


@given(
    st.lists(st.tuples(st.binary(max_size=300), st.integers(-1, 1)), max_size=8),
    st.lists(st.none() | st.integers(0, 9), min_size=8, max_size=8),
    _PIECES,
    st.sampled_from([0, 1, 64, 300]),
)
def test_values_go_into_their_buffers_and_nowhere_else(values, between, sizes, num_header_bytes):
    data = b"".join(
        encoded(value) + encoded(other) for (value, _), other in zip(values, between, strict=False)
    )
    reader = reader_of(FragmentingSocket(data, sizes))
    for (value, difference), other in zip(values, between, strict=False):
        room = bytearray(b"\xee" * (max(0, len(value) + difference) + 2))
        into = as_object(memoryview(room)[1:-1], num_header_bytes)
        assert reader.read_reply(into) == len(value)
        if into.nbytes == len(value):
            assert into.to_bytes() == value
        assert room[:1] == room[-1:] == b"\xee"
        assert reader.read_reply() == other
    with pytest.raises(RedisConnectionError):
        reader.read_reply()


@given(_LINES, _PIECES)
def test_simple_strings_and_null_are_read(text, sizes):
    reader = reader_of(FragmentingSocket(b"+" + text + b"\r\n$-1\r\n", sizes))
    assert reader.read_reply(as_object(bytearray(3))) == text
    assert reader.read_reply(as_object(bytearray(3))) is None


def test_read_reply_returns_errors_and_read_response_raises_connection_errors():
    reader = reader_of(FragmentingSocket(b"-WRONGTYPE no\r\n-LOADING wait\r\n-LOADING wait\r\n"))
    assert isinstance(reader.read_reply(), ResponseError)
    assert isinstance(reader.read_reply(), RedisConnectionError)
    with pytest.raises(RedisConnectionError, match="wait"):
        reader.read_response()


@pytest.mark.parametrize(
    "data",
    [
        b"?\r\n",
        b"\r\n",
        b"$many\r\n",
        b":\r\n",
        b"$3\r\nlonger\r\n",
        b"$99999999999\r\n",
        b"*99999999999\r\n",
        b"*1\r\n" * 9 + b":1\r\n",
        b"+" + b"x" * _READ_BYTES,
    ],
)
def test_malformed_replies_are_refused(data):
    with pytest.raises(InvalidResponse):
        reader_of(FragmentingSocket(data)).read_reply()


@given(st.binary(max_size=200), _PIECES)
def test_arbitrary_bytes_are_replies_or_an_error(data, sizes):
    reader = reader_of(FragmentingSocket(data, sizes))
    with pytest.raises((InvalidResponse, RedisConnectionError)):
        list(iter(reader.read_response, object()))


def test_a_closed_connection_is_an_error():
    reader = reader_of(FragmentingSocket(b":1\r\n"))
    reader.on_disconnect()
    with pytest.raises(RedisConnectionError, match="closed"):
        reader.read_reply()
