"""`native_block_keys`: block keys from a small library in C++, without the interpreter's lock.

`hashlib` keeps the lock for inputs as short as a block, so other threads wait while it hashes a
prompt. The library is built with the CPU kernels (`python -m kernels.library.build`) and is not
one of them: it needs no torch, and the router may load it. Where it is absent, or does not return
the keys that `kvstore.block_key` computes, Python computes them.
"""

import ctypes
import logging
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["LIBRARY_FOLDER", "HashBlocks", "load_library"]

LIBRARY_FOLDER = Path(__file__).parent / "native" / "lib"

HashBlocks = Callable[[bytes, bytes, "array[int]", int, int], bytes]
"""Returns the keys of successive full blocks, concatenated. Takes the hash's 16-byte tag, the key
before the first block, the blocks' token ids, the number of tokens per block and the length of a
key.
"""

_LOGGER = logging.getLogger("baton.kvstore")
_SUFFIXES = (".so", ".dylib")


@cache
def load_library(folder: Path = LIBRARY_FOLDER) -> HashBlocks | None:
    """Loads the library; returns None if it was not built or cannot be loaded.

    Args:
        folder: holds the library.
    """
    paths = sorted(path for path in folder.glob("lib*") if path.suffix in _SUFFIXES)
    if not paths or array("I").itemsize != ctypes.sizeof(ctypes.c_uint32):
        return None
    try:
        function = ctypes.CDLL(str(paths[0])).baton_block_keys
    except (OSError, AttributeError) as error:
        _LOGGER.warning("block keys are computed in Python: %s", error)
        return None
    integer = ctypes.c_int64
    function.argtypes = (integer, integer, *[ctypes.c_char_p] * 2, *[ctypes.c_void_p] * 2)
    function.restype = None

    def hash_blocks(
        tag: bytes, parent: bytes, token_ids: "array[int]", block_size: int, key_bytes: int
    ) -> bytes:
        num_blocks = len(token_ids) // block_size
        keys = ctypes.create_string_buffer(num_blocks * key_bytes)
        address, _ = token_ids.buffer_info()
        function(num_blocks, block_size, tag, parent, address, keys)
        return keys.raw

    return hash_blocks
