"""Framing of blocks in the messages of ReadBlocks: protobuf encoding, round trips, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import kv_peer_pb2 as pb
from kvstore.peer import framing
from kvstore.peer.framing import FrameFiller, FramingError, pack_chunks, to_message, to_view

BUFFERS = st.lists(st.binary(max_size=40), max_size=12)


@given(BUFFERS, st.integers(1, 50), st.integers(1, 20))
def test_received_frames_equal_those_sent(buffers, chunk_bytes, slot_bytes):
    stream = b"".join(buffers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "MAX_CHUNK_BYTES", chunk_bytes)
        chunks = list(pack_chunks(map(memoryview, buffers)))
    messages = [to_message(chunk) for chunk in chunks]
    num_slots = -(-len(stream) // slot_bytes)
    slots = [memoryview(bytearray(slot_bytes)) for _ in range(num_slots)]
    filler = FrameFiller(slots)
    for message in messages:
        filler.feed(to_view(message))

    assert b"".join(slots)[: len(stream)] == stream
    assert filler.num_full == len(stream) // slot_bytes
    lengths = [sum(map(len, chunk)) for chunk in chunks]
    assert all(length == chunk_bytes for length in lengths[:-1])
    assert all(0 < length <= chunk_bytes for length in lengths)


@pytest.mark.parametrize("num_bytes", [1, 127, 128, 16_383, 16_384, 1 << 20])
def test_messages_have_the_encoding_of_protobuf(num_bytes):
    data = bytes(num_bytes - 1) + b"x"
    message = to_message([memoryview(data)])
    assert message == pb.ReadBlocksResponse(data=data).SerializeToString()
    assert to_view(message) == data


@given(st.binary(max_size=30))
def test_other_messages_are_refused_or_parsed_as_by_protobuf(message):
    try:
        view = to_view(message)
    except FramingError:
        return
    assert pb.ReadBlocksResponse.FromString(message).data == view


@pytest.mark.parametrize(
    "change", [lambda m: m[:-1], lambda m: m + b"x", lambda m: b"\x12" + m[1:]]
)
def test_truncated_and_altered_messages_are_refused(change):
    message = to_message([memoryview(b"x" * 300)])
    with pytest.raises(FramingError):
        to_view(change(message))


def test_more_bytes_than_requested_are_refused():
    filler = FrameFiller([memoryview(bytearray(3))])
    filler.feed(memoryview(b"abc"))
    with pytest.raises(FramingError):
        filler.feed(memoryview(b"d"))
