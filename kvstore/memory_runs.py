"""Copies and digests of many runs of memory at a time.

The native library does it in one call, if it is there: the GIL is released and acquired once and
not for each block, and long runs bypass the caches (docs/adr/0026-native-copies.md). Without the
library, runs are copied and digested one by one.
"""

import logging
from array import array
from collections.abc import Sequence
from ctypes import addressof, c_char
from functools import cache

import numpy as np
import xxhash

from baton.common.errors import ConfigurationError
from kernels.native.memory_runs import NativeRuns, native_runs

__all__ = ["copy_runs", "digest_runs"]

_logger = logging.getLogger("baton.kvstore")

# Below this, copying is faster than finding the addresses for the native library.
_MIN_NATIVE_BYTES = 4096


def copy_runs(to: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copies each source to the view at the same place in `to`.

    Args:
        to: writable, contiguous views of items of any type.
        sources: contiguous views of as many bytes; none overlaps with a view in `to`.

    Raises (some runs may have been copied):
        TypeError: a view is not writable.
        ValueError: two lengths or the numbers of runs differ, or a view is not contiguous.
    """
    long = []
    for target, source in zip(to, sources, strict=True):
        num_bytes = source.nbytes
        if target.readonly:
            raise TypeError("it cannot be written to")
        if target.nbytes != num_bytes:
            raise ValueError(f"{num_bytes} bytes do not fit {target.nbytes}")
        if not (target.c_contiguous and source.c_contiguous):
            raise ValueError("bytes that are not contiguous")
        if num_bytes >= _MIN_NATIVE_BYTES:
            long.append((target, source))
        elif num_bytes:
            target.cast("B")[:] = source.cast("B")
    if long:
        _copy_long(long)


def digest_runs(prefixes: Sequence[bytes], runs: Sequence[memoryview]) -> list[bytes]:
    """Returns the XXH3-128 digests of runs.

    Args:
        prefixes: for each run, bytes that are digested before it.
        runs: contiguous views.

    Returns:
        16 bytes for each run, in the canonical order.
    """
    is_worth_it = len(runs) > 1 and any(run.nbytes >= _MIN_NATIVE_BYTES for run in runs)
    native = _native_runs() if is_worth_it else None
    if native is None:
        return [_digest(*pair) for pair in zip(prefixes, runs, strict=True)]
    ends, places, sizes = array("q"), array("Q"), array("q")
    end = 0
    for prefix, run in zip(prefixes, runs, strict=True):
        end += len(prefix)
        ends.append(end)
        places.append(_address(run))
        sizes.append(run.nbytes)
    digests = native.digest(b"".join(prefixes), ends, places, sizes)
    return [digests[start : start + 16] for start in range(0, len(digests), 16)]


def _copy_long(pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
    """Copies the second of each pair to the first; both meet the conditions of `copy_runs`."""
    native = _native_runs()
    if native is None:
        for target, source in pairs:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
        return
    places = array("Q", [addressof(c_char.from_buffer(target)) for target, _ in pairs])
    origins = array("Q", [_address(source) for _, source in pairs])
    native.copy(places, origins, array("q", [source.nbytes for _, source in pairs]))


def _digest(prefix: bytes, run: memoryview) -> bytes:
    digest = xxhash.xxh3_128(prefix)
    digest.update(run)
    value: bytes = digest.digest()
    return value


def _address(run: memoryview) -> int:
    """Returns the address of a view's bytes, valid while the view is referenced."""
    if run.readonly or not run.nbytes:
        return int(np.frombuffer(run, np.uint8).__array_interface__["data"][0])
    return addressof(c_char.from_buffer(run))


@cache
def _native_runs() -> NativeRuns | None:
    try:
        return native_runs()
    # An engine on a CPU does not start without the library, but one on a GPU does.
    except (ConfigurationError, OSError) as error:
        _logger.warning("KV is copied and digested without the native library: %s", error)
        return None
