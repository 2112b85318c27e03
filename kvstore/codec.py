r"""The frame around a stored KV block: a header that makes the object verify itself.

    slot: | header, 64 bytes | payload: the block's bytes |

    offset  bytes  field
         0      8  magic "BATONKV\0"
         8      2  frame format version, little-endian as all numbers
        10      2  digest scheme: 1 is xxh3-128
        12      4  zero
        16      8  payload length in bytes
        24     24  zero
        48     16  digest of the 48 bytes above, the key, and the payload

The digest is bound to the key: an object found under a key that it was not
sealed for is refused, as is any torn, truncated or changed one. xxh3 finds
accidents, not attackers: who may write to the store is the store's matter.

Pure: no torch. All functions work in place on preallocated memory.
"""

import struct

import xxhash

__all__ = ["DIGEST_SCHEME", "HEADER_BYTES", "make_header", "seal", "verify"]

HEADER_BYTES = 64
DIGEST_SCHEME = "xxh3-128"

_MAGIC = b"BATONKV\0"
_FORMAT_VERSION = 1
_DIGEST_SCHEME_ID = 1
_PREAMBLE = struct.Struct("<8sHHIQ24x")


def seal(slot: memoryview, key: bytes) -> None:
    """Writes the header for the payload that already lies in the slot.

    Args:
        slot: contiguous writable bytes, `HEADER_BYTES` and the payload.
        key: the key that the object will be stored under.

    Raises:
        ValueError: the slot is shorter than a header.
    """
    if len(slot) < HEADER_BYTES:
        raise ValueError(f"a slot has at least {HEADER_BYTES} bytes, not {len(slot)}")
    slot[:HEADER_BYTES] = make_header(slot[HEADER_BYTES:], key)


def make_header(payload: memoryview, key: bytes) -> bytes:
    """The header for a payload that lies elsewhere.

    Args:
        payload: the block's bytes, contiguous.
        key: as in `seal`.
    """
    preamble = _preamble(len(payload))
    return preamble + _digest(preamble, payload, key)


def verify(slot: memoryview, key: bytes) -> bool:
    """Whether the slot holds exactly what was sealed for this key.

    Args:
        slot: contiguous bytes as read from a store; its length is what the
            reader expects of the whole object.
        key: the key that the object was read from.
    """
    preamble = slot[: _PREAMBLE.size]
    return (
        len(slot) >= HEADER_BYTES
        and preamble == _preamble(len(slot) - HEADER_BYTES)
        and slot[_PREAMBLE.size : HEADER_BYTES] == _digest(preamble, slot[HEADER_BYTES:], key)
    )


def _preamble(num_payload_bytes: int) -> bytes:
    """Everything of the header but the digest. Equal lengths have equal preambles."""
    return _PREAMBLE.pack(_MAGIC, _FORMAT_VERSION, _DIGEST_SCHEME_ID, 0, num_payload_bytes)


def _digest(preamble: bytes | memoryview, payload: memoryview, key: bytes) -> bytes:
    """The key's length goes in as well, so that key and payload cannot trade bytes."""
    digest = xxhash.xxh3_128(preamble)
    digest.update(len(key).to_bytes(8, "little") + key)
    digest.update(payload)
    value: bytes = digest.digest()
    return value
