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

Header and payload may lie apart. Pure: no torch. All functions work in place on preallocated
memory.
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


def seal(header: memoryview, payload: memoryview, key: bytes) -> None:
    """Writes the header for a payload that is there already.

    Args:
        header: contiguous writable bytes.
        payload: the block's bytes, contiguous.
        key: the key that the object will be stored under.

    Raises:
        ValueError: there is not room for a header, or more.
    """
    if len(header) != HEADER_BYTES:
        raise ValueError(f"a header has {HEADER_BYTES} bytes, not {len(header)}")
    header[:] = make_header(payload, key)


def make_header(payload: memoryview, key: bytes) -> bytes:
    """The header for a payload, for who has no place for it yet.

    Args:
        payload: the block's bytes, contiguous.
        key: as in `seal`.
    """
    preamble = _preamble(len(payload))
    return preamble + _digest(preamble, payload, key)


def verify(header: memoryview, payload: memoryview, key: bytes) -> bool:
    """Whether this is exactly what was sealed for this key.

    Args:
        header: contiguous bytes as read from a store.
        payload: as `header`; its length is what the reader expects of the block.
        key: the key that the object was read from.
    """
    preamble, digest = header[: _PREAMBLE.size], header[_PREAMBLE.size :]
    is_ours = preamble == _preamble(len(payload))
    return is_ours and digest == _digest(preamble, payload, key)


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
