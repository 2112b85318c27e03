"""The block codec: sealed objects verify, and all others are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import codec
from kvstore.codec import HEADER_BYTES, make_headers, seal
from kvstore.store import KvObject

_KEYS = st.binary(min_size=32, max_size=32)
_PAYLOADS = st.binary(min_size=0, max_size=300)


def _sealed(payload, key):
    slot = memoryview(bytearray(b"\xee" * HEADER_BYTES + payload))
    seal([KvObject.split(slot, HEADER_BYTES)], [key])
    return slot


def verify(whole, key):
    """Verifies an object whose header and payload are adjacent in `whole`."""
    return codec.verify([KvObject.split(whole, HEADER_BYTES)], [key])


@given(_PAYLOADS, _KEYS)
def test_header_and_payload_may_be_separate_buffers(payload, key):
    header = memoryview(bytearray(HEADER_BYTES))
    seal([(header, memoryview(payload))], [key])
    assert header == _sealed(payload, key)[:HEADER_BYTES]
    assert [header] == make_headers([memoryview(payload)], [key])
    assert codec.verify([(header, memoryview(bytes(payload)))], [key])


def test_a_header_of_another_length_is_refused():
    slot = _sealed(b"payload", b"k" * 32)
    for length in (0, 63, 65, len(slot)):
        assert not codec.verify([(slot[:length], slot[HEADER_BYTES:])], [b"k" * 32])


@given(_PAYLOADS, _KEYS)
def test_a_sealed_slot_verifies_and_keeps_its_payload(payload, key):
    slot = _sealed(payload, key)
    assert verify(slot, key)
    assert bytes(slot[HEADER_BYTES:]) == payload


@given(_PAYLOADS, _KEYS, st.data())
def test_any_flipped_bit_is_refused(payload, key, data):
    slot = _sealed(payload, key)
    bit = data.draw(st.integers(0, len(slot) * 8 - 1))
    slot[bit // 8] ^= 1 << bit % 8
    assert not verify(slot, key)


def test_every_flipped_bit_of_a_header_is_refused():
    slot = _sealed(b"payload", b"k" * 32)
    for bit in range(len(slot) * 8):
        slot[bit // 8] ^= 1 << bit % 8
        assert not verify(slot, b"k" * 32)
        slot[bit // 8] ^= 1 << bit % 8
    assert verify(slot, b"k" * 32)


@given(_PAYLOADS, _KEYS, st.data())
def test_any_truncation_is_refused(payload, key, data):
    slot = _sealed(payload, key)
    length = data.draw(st.integers(0, len(slot) - 1))
    assert not verify(slot[:length], key)


@given(_PAYLOADS, _KEYS, st.binary(min_size=1, max_size=64))
def test_trailing_bytes_are_refused(payload, key, trailing):
    assert not verify(memoryview(bytes(_sealed(payload, key)) + trailing), key)


@given(_PAYLOADS, _KEYS, _KEYS)
def test_another_key_is_refused(payload, key, other):
    assert verify(_sealed(payload, key), other) == (key == other)


@given(_PAYLOADS, _PAYLOADS, _KEYS)
def test_a_header_fits_no_other_payload(payload, other, key):
    slot = _sealed(payload, key)
    mixed = memoryview(bytes(slot[:HEADER_BYTES]) + other)
    assert verify(mixed, key) == (payload == other)


@given(st.binary(max_size=300), _KEYS)
def test_foreign_bytes_are_refused(foreign, key):
    assert not verify(memoryview(foreign), key)


@pytest.mark.parametrize("name", ["OBJECT_FORMAT_VERSION", "_DIGEST_SCHEME_ID", "_MAGIC"])
def test_a_frame_of_another_version_is_refused(monkeypatch, name):
    with monkeypatch.context() as patched:
        patched.setattr(codec, name, b"OTHERKV\0" if name == "_MAGIC" else 2)
        slot = _sealed(b"payload", b"k" * 32)
        assert verify(slot, b"k" * 32)
    assert not verify(slot, b"k" * 32)


@pytest.mark.parametrize("length", [0, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_sealing_a_header_of_another_length_raises(length):
    with pytest.raises(ValueError, match="64"):
        seal([(memoryview(bytearray(length)), memoryview(b"payload"))], [b"k" * 32])


def test_the_format_equals_its_recorded_bytes():
    """A change of these bytes needs a new format version, since other versions read them."""
    slot = _sealed(bytes(range(16)), bytes(32))
    assert bytes(slot[:48]) == b"BATONKV\0" + b"\1\0\1\0" + bytes(4) + b"\x10" + bytes(31)
    assert bytes(slot[48:64]).hex() == "5caf67f97ab55db9bcf99b21865f3940"
