"""A process with a `NixlTransport` and some bytes, that others read and write."""

import ctypes
import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kvstore.peer.nixl.transport import NixlTransport
from kvstore.peer.transport import RangeTable, make_ranges

__all__ = ["NixlRemote", "Pool", "ranges"]

_LIMIT_S = 60.0


class Pool:
    """Registered bytes, with guards around each range that `ranges` cuts."""

    def __init__(self, num_bytes: int, seed: int) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
        self.address = self.bytes.ctypes.data

    def register(self, transport: NixlTransport) -> None:
        transport.register(self.address, self.bytes.nbytes, device="cpu")


def ranges(address: int, num_ranges: int, num_bytes: int, *, gap: int) -> RangeTable:
    """Ranges with `gap` bytes before each."""
    starts = [address + gap + i * (num_bytes + gap) for i in range(num_ranges)]
    return make_ranges(starts, num_bytes)


class NixlRemote:
    """A process that is asked over a pipe.

    Args:
        num_bytes: of its memory.
        seed: of what lies there.
        transports: UCX's, for it alone; None for all.

    Attributes:
        metadata: of its transport.
        address: where its bytes lie.
        bytes: what they are at first.
    """

    def __init__(self, num_bytes: int, seed: int = 1, transports: str | None = None) -> None:
        # Forked from a process in which nothing has begun; it has another environment than ours.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvstore.peer.nixl.transport"])
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, num_bytes, seed, transports)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.metadata, self.address = self._answer()
        self.bytes = Pool(num_bytes, seed).bytes

    def now(self) -> np.ndarray:
        """What its bytes are now."""
        self._pipe.send(("bytes",))
        return np.frombuffer(self._answer(), np.uint8)

    def peek(self) -> np.ndarray:
        """What its bytes are now, also while it is stopped."""
        with Path(f"/proc/{self.process.pid}/mem").open("rb") as memory:
            memory.seek(self.address)
            return np.frombuffer(memory.read(self.bytes.nbytes), np.uint8)

    def keep_reading(self, other: "NixlRemote") -> None:
        """Has it read all bytes of another one again and again; returns once it has begun."""
        self._pipe.send(("read", other.metadata, other.address, other.bytes.nbytes))
        self._answer()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(_LIMIT_S)

    def close(self) -> None:
        """Lets it end by itself, if it can; otherwise kills it."""
        with suppress(OSError):
            self._pipe.send(("close",))
            self.process.join(5)
        self.kill()
        self._pipe.close()
        self.process.close()

    def _answer(self):
        assert self._pipe.poll(_LIMIT_S), "the remote does not answer"
        return self._pipe.recv()


def _serve(pipe: Connection, num_bytes: int, seed: int, transports: str | None) -> None:
    if transports is not None:
        os.environ["UCX_TLS"] = transports
    transport = NixlTransport()
    pool = Pool(num_bytes, seed)
    pool.register(transport)
    pipe.send((transport.metadata(), pool.address))
    while (command := pipe.recv())[0] != "close":
        if command[0] == "bytes":
            pipe.send(ctypes.string_at(pool.address, num_bytes))
        else:
            _read_for_ever(transport, pool, pipe, *command[1:])
    transport.close()


def _read_for_ever(transport, pool, pipe, metadata, address, num_bytes) -> None:
    transport.add_peer("other", metadata)
    source = make_ranges([address], num_bytes)
    target = make_ranges([pool.address], num_bytes)
    transport.read("other", source, target, _LIMIT_S)
    pipe.send("begun")
    while True:
        transport.read("other", source, target, _LIMIT_S)
