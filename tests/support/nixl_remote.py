"""A process with a `NixlTransport` and some bytes that other processes read."""

import ctypes
import multiprocessing
import os
import signal
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from baton.doctor.nixl_reads import why_unreadable
from kvstore.peer.nixl.transport import NixlTransport
from kvstore.peer.transport import RangeTable, UnreadablePeerError, make_ranges
from tests.support.confinement import forbid_process_vm_calls

__all__ = ["NixlRemote", "Pool", "needs_process_vm_readv", "ranges"]

_LIMIT_S = 60.0
_why_unreadable = cache(why_unreadable)


class Pool:
    """Registered bytes; the gaps of `ranges` guard each range."""

    def __init__(self, num_bytes: int, seed: int) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
        self.address = self.bytes.ctypes.data

    def register(self, transport: NixlTransport) -> None:
        transport.register(self.address, self.bytes.nbytes, device="cpu")


def ranges(address: int, num_ranges: int, num_bytes: int, *, gap: int) -> RangeTable:
    """Returns ranges with `gap` bytes before each."""
    starts = [address + gap + i * (num_bytes + gap) for i in range(num_ranges)]
    return make_ranges(starts, num_bytes)


class NixlRemote:
    """A process with registered memory, driven over a pipe.

    Args:
        num_bytes: size of its memory.
        seed: seed of the bytes there.
        transports: its UCX_TLS; None to leave that unset.
        is_confined: whether the kernel forbids it to read other processes' memory.

    Attributes:
        metadata: metadata of its transport.
        address: address of its memory.
        bytes: the initial bytes of its memory.
    """

    def __init__(
        self,
        num_bytes: int,
        seed: int = 1,
        transports: str | None = None,
        *,
        is_confined: bool = False,
    ) -> None:
        # Forked from a clean process; its environment differs from that of this process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvstore.peer.nixl.transport"])
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, num_bytes, seed, transports, is_confined)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.metadata, self.address = self._answer()
        self.bytes = Pool(num_bytes, seed).bytes

    def now(self) -> np.ndarray:
        """Returns its current bytes."""
        self._pipe.send(("bytes",))
        return np.frombuffer(self._answer(), np.uint8)

    def peek(self) -> np.ndarray:
        """Returns its current bytes, even while it is stopped."""
        with Path(f"/proc/{self.process.pid}/mem").open("rb") as memory:
            memory.seek(self.address)
            return np.frombuffer(memory.read(self.bytes.nbytes), np.uint8)

    def keep_reading(self, other: "NixlRemote") -> None:
        """Makes it read all bytes of another one in a loop; returns after the first read."""
        self._pipe.send(("read", other.metadata, other.address, other.bytes.nbytes))
        self._answer()

    def try_to_add(self, other: "NixlRemote") -> str:
        """Makes it add another one as a peer; returns the error, or "" without one."""
        self._pipe.send(("add", other.metadata))
        return self._answer()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(_LIMIT_S)

    def close(self) -> None:
        """Asks it to end; kills it if it does not."""
        with suppress(OSError):
            self._pipe.send(("close",))
            self.process.join(5)
        self.kill()
        self._pipe.close()
        self.process.close()

    def _answer(self):
        assert self._pipe.poll(_LIMIT_S), "the remote does not answer"
        return self._pipe.recv()


def _serve(
    pipe: Connection, num_bytes: int, seed: int, transports: str | None, is_confined: bool
) -> None:
    # The fork server has the environment of the test that used it first.
    os.environ.pop("UCX_TLS", None)
    if transports is not None:
        os.environ["UCX_TLS"] = transports
    if is_confined:
        forbid_process_vm_calls()
    transport = NixlTransport()
    pool = Pool(num_bytes, seed)
    pool.register(transport)
    pipe.send((transport.metadata(), pool.address))
    while (command := pipe.recv())[0] != "close":
        if command[0] == "bytes":
            pipe.send(ctypes.string_at(pool.address, num_bytes))
        elif command[0] == "add":
            pipe.send(_try_to_add(transport, command[1]))
        else:
            _read_forever(transport, pool, pipe, *command[1:])
    transport.close()


def _try_to_add(transport: NixlTransport, metadata: bytes) -> str:
    try:
        transport.add_peer("other", metadata, _LIMIT_S)
    except UnreadablePeerError as error:
        return str(error)
    return ""


def _read_forever(transport, pool, pipe, metadata, address, num_bytes) -> None:
    transport.add_peer("other", metadata, _LIMIT_S)
    source = make_ranges([address], num_bytes)
    target = make_ranges([pool.address], num_bytes)
    transport.read("other", source, target, _LIMIT_S)
    pipe.send("begun")
    while True:
        transport.read("other", source, target, _LIMIT_S)


def needs_process_vm_readv() -> None:
    """Skips the test on a machine where nixl cannot read another process's memory."""
    if reason := _why_unreadable():
        pytest.skip(f"needs to read another process's memory (process_vm_readv): {reason}")
