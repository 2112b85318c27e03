"""Conversions of clients' inputs; large ones run in threads, to delay no other request."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

__all__ = ["MAX_INLINE_BYTES", "MAX_INLINE_LENGTH", "call_by_length", "convert_input"]

MAX_INLINE_BYTES = 16 * 1024
"""The most bytes of an input that the event loop converts itself, in a few milliseconds."""
MAX_INLINE_LENGTH = 4096
"""Characters or token ids that the event loop handles itself; a thread handles longer prompts,
which would delay other requests.
"""
_MAX_MEDIUM_BYTES = 1024 * 1024

# Each thread that computes delays the event loop, which waits for the interpreter's lock, so there
# are no more: one for the inputs of common sizes, and one for those beyond, which wait for another.
_MEDIUM = ThreadPoolExecutor(1, "medium-inputs")
_LARGE = ThreadPoolExecutor(1, "large-inputs")

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


async def convert_input(
    num_bytes: int,
    convert: Callable[_P, _Result],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _Result:
    """Returns the result of a conversion, whose time depends on the size of a client's input.

    Args:
        num_bytes: the size of the input.
        convert: the conversion; it runs in any thread, with the context variables of the caller.
        args: its arguments.
        kwargs: its further arguments.
    """
    if num_bytes <= MAX_INLINE_BYTES:
        return convert(*args, **kwargs)
    thread = _MEDIUM if num_bytes <= _MAX_MEDIUM_BYTES else _LARGE
    call = partial(copy_context().run, convert, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(thread, call)


async def call_by_length(
    length: int,
    function: Callable[_P, _Result],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _Result:
    """Returns the result of a function of texts and tokens; a thread calls it if they are long.

    Args:
        length: their characters and ids.
        function: the function.
        args: its arguments.
        kwargs: its further arguments.
    """
    if length <= MAX_INLINE_LENGTH:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
