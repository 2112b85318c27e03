"""The native library's commands as rows of eight-byte fields, as `commands.h` declares them."""

import ctypes
import struct
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from baton.common.errors import ConfigurationError
from kernels.library.library import load
from kernels.ranks import RanksLostError
from kernels.row_state import DrawTable

__all__ = [
    "APPLY_LOGIT_RULES",
    "ARGMAX",
    "COMBINE_EXPERTS",
    "DRAW_TOKENS",
    "EXPERT_LINEAR",
    "GATED_DELTA",
    "GATE_ROWS",
    "GATHER_COLUMNS",
    "HEAD_LINEAR",
    "LAYER_NORM",
    "LINEAR",
    "PAGED_ATTENTION",
    "REDUCE_RANKS",
    "RMS_NORM",
    "ROTARY_ANGLES",
    "ROTATE_AND_WRITE_KV",
    "ROTATE_AND_WRITE_LATENT",
    "ROUTE_EXPERTS",
    "SHORT_CONV",
    "TAKE_ROWS",
    "CommandType",
    "NativeKernels",
    "library",
]

_MAX_FIELDS = 32
# The library's functions return 0 on success and 1 if memory ran out.
_NO_THREADS = 2
_RANKS_LOST = 3


@dataclass(frozen=True, slots=True)
class CommandType:
    """The layout of one type of command.

    Attributes:
        code: identifies the type in the library.
        layout: the code, the fields, and padding up to `_MAX_FIELDS`.
        pointers: indices of the fields that are addresses of tensors; the code has index 0.
        outputs: the `pointers` to memory that the command writes without reading it first.
    """

    code: int
    layout: struct.Struct
    pointers: tuple[int, ...]
    outputs: tuple[int, ...]

    def pack(self, *fields: float) -> bytes:
        """Packs a command: integers and floats in the order of the C++ struct."""
        return self.layout.pack(self.code, *fields)


def _command(code: int, fields: str) -> CommandType:
    """Describes a command; in `fields`, i is an integer, d a double, p an address that is read
    (and may be written), w an address that is only written.
    """
    letters = fields.replace(" ", "")
    padding = 8 * (_MAX_FIELDS - len(letters))
    kinds = "".join("d" if letter == "d" else "q" for letter in letters)
    return CommandType(
        code=code,
        layout=struct.Struct(f"=q{kinds}{padding}x"),
        pointers=tuple(i for i, letter in enumerate(letters, 1) if letter in "pw"),
        outputs=tuple(i for i, letter in enumerate(letters, 1) if letter == "w"),
    )


LINEAR = _command(0, "i pi ii pi p pi ii dd wi i ii")
TAKE_ROWS = _command(1, "i piii ii pi d pi w i i")
RMS_NORM = _command(2, "i pi ii p d i pi w")
ROTARY_ANGLES = _command(3, "pi pi d ww")
ROTATE_AND_WRITE_KV = _command(4, "i ppp iii iii pp dii pp i i w iiiii w iii p")
PAGED_ATTENTION = _command(5, "i pi iiii i p iiiii p iii dd i p w p")
ARGMAX = _command(6, "p iii ww")
APPLY_LOGIT_RULES = _command(7, "p ii pp pppp i p i pp ppi pi pii p")
DRAW_TOKENS = _command(8, f"p ii pp {'p' * len(fields(DrawTable))} ppp ii w")
REDUCE_RANKS = _command(9, "i i pii p pi d w")
GATHER_COLUMNS = _command(10, "i pii w")
ROUTE_EXPERTS = _command(11, "i pi ii ii pp iii i d i ii wwww")
EXPERT_LINEAR = _command(12, "i pi ii p iii p ii pp w ii")
COMBINE_EXPERTS = _command(13, "i piii pp ppi pi w i")
GATE_ROWS = _command(15, "i pi pi ii i w")
SHORT_CONV = _command(14, "ii pi ii pp piii i p w")
GATED_DELTA = _command(16, "i pi pi pi pi pi pp iiii piii i p w")
LAYER_NORM = _command(17, "i pi ii pp d pi w")
HEAD_LINEAR = _command(18, "i piiii i pi ii w")
ROTATE_AND_WRITE_LATENT = _command(19, "i pp ii ii pi d pp i i w iii w i p")


class NativeKernels:
    """The library's compute functions.

    Args:
        functions: the loaded library.
    """

    def __init__(self, functions: ctypes.CDLL) -> None:
        integer, address = ctypes.c_int64, ctypes.c_void_p
        self._run = functions.baton_run
        self._run.argtypes, self._run.restype = (address, integer), integer
        self._set_num_threads = functions.baton_set_num_threads
        self._set_num_threads.argtypes, self._set_num_threads.restype = (integer,), integer
        self.num_threads = functions.baton_num_threads
        self.num_threads.argtypes, self.num_threads.restype = (), integer
        self.open_ranks = functions.baton_open_ranks
        self.open_ranks.argtypes = (integer, integer, integer)
        self.open_ranks.restype = address
        self.close_ranks = _procedure(functions.baton_close_ranks, address)
        self.limit_rank_waits = _procedure(
            functions.baton_limit_rank_waits, address, ctypes.c_double
        )
        self.abort_ranks = _procedure(functions.baton_abort_ranks, address)
        self._send = functions.baton_send_to_ranks
        self._send.argtypes, self._send.restype = (address, address, integer), integer
        self._receive = functions.baton_receive_from_rank_0
        self._receive.argtypes, self._receive.restype = (address, integer), integer
        self._inbox = functions.baton_inbox
        self._inbox.argtypes, self._inbox.restype = (address,), address
        self._inbox_bytes = functions.baton_inbox_bytes
        self._inbox_bytes.argtypes, self._inbox_bytes.restype = (address,), integer
        self.pack = functions.baton_pack
        self.pack.argtypes = (integer, address, *[integer] * 4, address, integer, integer)
        self.pack.restype = None
        self.pack_blocks = functions.baton_pack_blocks
        self.pack_blocks.argtypes = (integer, address, *[integer] * 3, address, integer, integer)
        self.pack_blocks.restype = None
        self._decode_rows = functions.baton_decode_rows
        self._decode_rows.argtypes = (integer, address, *[integer] * 3, address)
        self._decode_rows.restype = integer
        self.quantized_bytes = functions.baton_quantized_bytes
        self.quantized_bytes.argtypes, self.quantized_bytes.restype = (integer,) * 3, integer

    def run(self, commands: bytes | int, count: int = 1) -> None:
        """Runs `count` packed commands, given as bytes or by their address, without the GIL.

        Raises:
            MemoryError: the library could not allocate its working memory.
            ConfigurationError: the system refuses to create its threads.
            RanksLostError: another rank is lost, or too late.
        """
        outcome = self._run(commands, count)
        if outcome:
            raise _error(outcome, self.num_threads())

    def decode_rows(
        self, code: int, source: int, row_bytes: int, num_rows: int, num_columns: int, out: int
    ) -> None:
        """Decodes rows of blocks, of the format with this code, into float32.

        Raises:
            MemoryError: the library could not allocate its working memory.
        """
        self._check(self._decode_rows(code, source, row_bytes, num_rows, num_columns, out))

    def send_to_ranks(self, ranks: int, data: bytes) -> None:
        """Sends bytes to all other ranks, without the GIL; `ranks` is of `open_ranks`.

        Raises:
            RanksLostError: another rank is lost, or too late.
        """
        self._check(self._send(ranks, data, len(data)))

    def receive_from_rank_0(self, ranks: int, *, waits_forever: bool) -> bytes:
        """Waits for what rank 0 sends, without the GIL.

        Raises:
            RanksLostError: another rank is lost, or too late.
        """
        self._check(self._receive(ranks, waits_forever))
        return ctypes.string_at(self._inbox(ranks), self._inbox_bytes(ranks))

    def _check(self, outcome: int) -> None:
        if outcome:
            raise _error(outcome, self.num_threads())

    def set_num_threads(self, num_threads: int) -> None:
        """Replaces the compute threads; the number stays as it was if that fails.

        Raises:
            MemoryError: the library could not allocate the threads' memory.
            ConfigurationError: the system refuses to create that many threads.
        """
        outcome = self._set_num_threads(num_threads)
        if outcome:
            raise _error(outcome, num_threads)


def _procedure(function: Any, *argtypes: type) -> Any:
    """Returns a function of the library that returns nothing."""
    function.argtypes, function.restype = argtypes, None
    return function


def _error(outcome: int, num_threads: int) -> Exception:
    if outcome == _RANKS_LOST:
        return RanksLostError("another rank has failed, is lost, or has not answered in time")
    if outcome == _NO_THREADS:
        return ConfigurationError(
            f"--num-threads is {num_threads}: the system does not make so many; lower it, or "
            "raise the limits on processes and memory"
        )
    return MemoryError("the native CPU kernels ran out of memory")


@cache
def library() -> NativeKernels | None:
    """Returns the library of this process; None if torch serves the CPU.

    Raises:
        ConfigurationError: see `kernels.library.library.select`.
    """
    functions = load()
    return None if functions is None else NativeKernels(functions)
