r"""The header of a stored KV block, by which a reader verifies the object.

    object: | header, 64 bytes | payload: the block's bytes |

    offset  bytes  field
         0      8  magic "BATONKV\0"
         8      2  frame format version, little-endian as all numbers
        10      2  digest scheme: 1 is xxh3-128
        12      4  zero
        16      8  payload length in bytes
        24     24  zero
        48     16  digest of the 48 bytes above, the key, and the payload

The digest covers the key: an object under a key that it was not sealed for is
refused, as is any torn, truncated or changed one. xxh3 detects accidents, not
attacks: access control is the store's task.

The functions take lists of objects, which are digested together
(`kvstore.memory_runs`), and work in place on preallocated memory.
"""

import struct
from collections.abc import Iterable, Sequence

from kvstore.formats import OBJECT_FORMAT_VERSION
from kvstore.memory_runs import digest_runs
from kvstore.store import KvObject

__all__ = ["DIGEST_SCHEME", "HEADER_BYTES", "make_headers", "other_format", "seal", "verify"]

HEADER_BYTES = 64
DIGEST_SCHEME = "xxh3-128"

_MAGIC = b"BATONKV\0"
_DIGEST_SCHEME_ID = 1
_PREAMBLE = struct.Struct("<8sHHIQ24x")


def seal(objects: Sequence[KvObject], keys: Sequence[bytes]) -> None:
    """Writes the headers of objects whose payloads are complete.

    Args:
        objects: each with a writable header, and a block's bytes as payload.
        keys: the key that each will be stored under.

    Raises:
        ValueError: a header does not have `HEADER_BYTES` bytes.
    """
    for header, _ in objects:
        if len(header) != HEADER_BYTES:
            raise ValueError(f"a header has {HEADER_BYTES} bytes, not {len(header)}")
    made = make_headers([payload for _, payload in objects], keys)
    for (header, _), content in zip(objects, made, strict=True):
        header[:] = content


def make_headers(payloads: Sequence[memoryview], keys: Sequence[bytes]) -> list[bytes]:
    """Returns the headers for payloads.

    Args:
        payloads: each a block's bytes, contiguous.
        keys: see `seal`.
    """
    preambles = [_preamble(len(payload)) for payload in payloads]
    digests = digest_runs(_prefixes(preambles, keys), payloads)
    return [preamble + digest for preamble, digest in zip(preambles, digests, strict=True)]


def verify(objects: Sequence[KvObject], keys: Sequence[bytes]) -> int:
    """Returns how many leading objects are exactly what was sealed for their keys.

    Args:
        objects: as read from a store; the length of a payload is what the reader expects of the
            block.
        keys: the key that each was read from.
    """
    expected = make_headers([payload for _, payload in objects], keys)
    are_whole = (header == content for (header, _), content in zip(objects, expected, strict=True))
    return next((index for index, is_whole in enumerate(are_whole) if not is_whole), len(objects))


def other_format(header: memoryview) -> str:
    """Returns why an object that `verify` refuses cannot be read here: another version of Baton has
    sealed it. Names both versions of the format; empty if it is of this one, or damaged.

    Args:
        header: of the object.
    """
    magic, version, *_ = _PREAMBLE.unpack_from(header)
    if magic != _MAGIC or version == OBJECT_FORMAT_VERSION:
        return ""
    return f"object format version: this replica has {OBJECT_FORMAT_VERSION}, the object {version}"


def _preamble(num_payload_bytes: int) -> bytes:
    """Returns the header without the digest. It depends on the payload's length only."""
    return _PREAMBLE.pack(_MAGIC, OBJECT_FORMAT_VERSION, _DIGEST_SCHEME_ID, 0, num_payload_bytes)


def _prefixes(preambles: Iterable[bytes], keys: Iterable[bytes]) -> list[bytes]:
    """Returns the bytes that are digested before each payload. They include the key's length, so
    that bytes cannot move between key and payload.
    """
    return [
        preamble + len(key).to_bytes(8, "little") + key
        for preamble, key in zip(preambles, keys, strict=True)
    ]
