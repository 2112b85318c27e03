"""How ranks whose processes are started apart meet, on one or several hosts.

    rank 0       listens; two connections from each other rank: for steps, and for transfers
    rank 1 ...   connect to rank 0
    stages       each rank connects to the one with its place in the next stage

The ranks meet through a store of torch at rank 0's address (or their launcher's), in which
listening ranks write their addresses. A caller must prove that it knows the cluster's token, and so
must the listening rank: messages are pickled. Neither the store nor gloo, which adds up between the
ranks of a stage, asks for it or encrypts.
"""

import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from baton.common.version import __version__
from engine.runtime.ranks.place import RankPlace

__all__ = ["END", "Meeting", "shut_down"]

_logger = logging.getLogger("baton.engine")
END = b"end"
"""Rank 0's last message: no batch, as these are pickled, and no tokens, of eight bytes each."""

_MEETING_S = 300.0
"""How long ranks wait for each other when they start: an image may have to be pulled."""
_LOADING_S = 86400.0
"""How long they wait for each other while they load."""
_RETRY_S = 0.2
_CHECK_S = 1.0
_ANSWER_S = 10
_NAME_BYTES = 64
_STEPS, _TRANSFERS, _HIDDEN = "steps", "transfers", "hidden"
# A host that is cut off is noticed after these times.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_UNSENT_MS = 20_000

_Name = tuple[str, int]  # a connection's kind, and the rank that opens it


@dataclass
class Meeting:
    """A rank's connections to the others. `meet` opens them.

    Args:
        place: this process's place.
        num_stages: number of pipeline stages.
        key: what both sides of a connection prove to know.
        check_others: called while this rank waits for others; raises if they will not come.
        has_gloo: whether to open `gloo`.

    Attributes:
        steps: connections for steps: rank 0's to the others by rank, or the one to rank 0.
        transfers: connections for transfers, in the same order.
        before: connection to the stage before; None for the first stage.
        after: connection to the stage after; None for the last one.
        gloo: adds up between the ranks of this stage; None if it has one, or a GPU each.
    """

    place: RankPlace
    num_stages: int
    key: bytes
    check_others: Callable[[], None]
    has_gloo: bool = True
    steps: dict[int, Connection] = field(default_factory=dict)
    transfers: list[Connection] = field(default_factory=list)
    before: Connection | None = None
    after: Connection | None = None
    gloo: Any = None
    _store: Store | None = None
    _deadline: float = 0.0

    def meet(self) -> None:
        """Waits for the other ranks.

        Raises:
            OSError, EOFError, RuntimeError, AuthenticationError: they did not meet.
        """
        self._deadline = time.monotonic() + _MEETING_S
        place = self.place
        store = self._store = _open_store(place)
        try:
            attempt = self._accept_all(store) if place.rank == 0 else self._connect(store)
            own_address = _own_address(self.steps[0 if place.rank else 1])
            group = PrefixStore(attempt, store)
            if self.num_stages > 1:
                self._meet_neighbours(group, own_address)
            width = place.size // self.num_stages
            if width > 1 and self.has_gloo:
                stage = PrefixStore(str(place.rank // width), group)
                self.gloo = _open_gloo(place.rank % width, width, stage, own_address)
        except BaseException:
            self.close()
            raise

    def links(self) -> list[Connection]:
        """Returns all connections that are open."""
        neighbours = [link for link in (self.before, self.after) if link is not None]
        return [*self.steps.values(), *self.transfers, *neighbours]

    def close(self) -> None:
        """Closes the connections."""
        for link in self.links():
            link.close()
        self.steps.clear()
        self.transfers.clear()
        self.before = self.after = self.gloo = self._store = None

    def _accept_all(self, store: Store) -> str:
        """Accepts two connections from each other rank; returns the name of this attempt.

        A launcher's store outlives a group, so the port is named with the attempt.
        """
        others, attempt = range(1, self.place.size), secrets.token_hex(8)
        names = {(kind, rank) for kind in (_STEPS, _TRANSFERS) for rank in others}
        with closing(socket.create_server((self.place.address, 0))) as server:
            store.set("port", f"{server.getsockname()[1]} {attempt} {__version__}")
            links = self._accept(server, names)
        self.steps = {rank: links[_STEPS, rank] for rank in others}
        self.transfers = [links[_TRANSFERS, rank] for rank in others]
        if self.num_stages > 1:
            # A stage reads a batch when it has computed those before, which may take long.
            for link in self.steps.values():
                _limit_unsent(link, 0)
        for link in links.values():
            link.send_bytes(attempt.encode())
        return attempt

    def _accept(self, server: socket.socket, names: set[_Name]) -> dict[_Name, Connection]:
        """Accepts connections until those that are wanted are there."""
        links: dict[_Name, Connection] = {}
        server.settimeout(_CHECK_S)
        try:
            while names - links.keys():
                self._check_wait()
                with suppress(TimeoutError):
                    link = _connection(server.accept()[0])
                    name = _authenticate(link, self.key)
                    if name not in names:
                        link.close()  # no rank of this group
                        continue
                    if name in links:  # of a process that has ended since
                        links[name].close()
                    links[name] = link
        except BaseException:
            for link in links.values():
                link.close()
            raise
        return links

    def _connect(self, store: Store) -> str:
        """Connects twice to rank 0; returns the name of its attempt."""
        while True:
            port, attempt = self._await_attempt(store)
            try:
                self.steps[0] = self._open_link(self.place.address, port, _STEPS)
                self.transfers.append(self._open_link(self.place.address, port, _TRANSFERS))
                for link in self.links():
                    self._wait_until(link.poll)
                    if link.recv_bytes(_NAME_BYTES).decode() != attempt:
                        raise ConnectionError("rank 0 has begun again")
                    _limit_answers(link, 0)
                return attempt
            except (OSError, EOFError):  # the port may be that of a group that has ended
                for link in self.links():
                    link.close()
                self.steps.clear()
                self.transfers.clear()
                if time.monotonic() > self._deadline:
                    raise
                time.sleep(_RETRY_S)

    def _await_attempt(self, store: Store) -> tuple[int, str]:
        """Waits for an attempt of rank 0 of this version; returns its port and its name.

        One of another version may be of a group that has ended, and a new one follows. Messages
        of ranks have no format of their own.
        """
        problem = "timed out"
        while True:
            if store.check(["port"]):
                # Port, attempt and version; other versions may write less or more.
                port, attempt, version, *_ = [*store.get("port").decode().split(), "", "", ""]
                if version == __version__:
                    return int(port), attempt
                version = version or "of an earlier version"
                other = f"rank 0 is Baton {version}, this rank {__version__}"
                if other != problem:
                    _logger.warning("%s; waiting for another rank 0", other)
                problem = other
            self._check_wait(problem)
            time.sleep(_RETRY_S)

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        """Waits for rank 0, which may wait for others."""
        while not is_there():
            self._check_wait()
            time.sleep(_RETRY_S)

    def _check_wait(self, problem: str = "timed out") -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(problem)
        self.check_others()

    def _meet_neighbours(self, store: Store, own_address: str) -> None:
        """Connects to the stage after, then accepts the stage before. Rank 0's has none after."""
        rank, width = self.place.rank, self.place.size // self.num_stages
        with closing(socket.create_server((own_address, 0))) as server:
            store.set(f"{_HIDDEN}{rank}", f"{own_address} {server.getsockname()[1]}")
            if rank >= width:
                address, port = store.get(f"{_HIDDEN}{rank - width}").decode().split()
                self.after = self._open_link(address, int(port), _HIDDEN)
                _limit_answers(self.after, 0)
                # A stage reads when it has computed its step, which may take long.
                _limit_unsent(self.after, 0)
            if rank + width < self.place.size:
                name = _HIDDEN, rank + width
                self.before = self._accept(server, {name})[name]

    def _open_link(self, address: str, port: int, kind: str) -> Connection:
        link = _connection(socket.create_connection((address, port), _ANSWER_S))
        try:
            answer_challenge(link, self.key)
            deliver_challenge(link, self.key)
            link.send_bytes(f"{kind} {self.place.rank}".encode())
        except BaseException:
            link.close()
            raise
        return link


def shut_down(link: Connection) -> None:
    """Ends a connection for both sides, also if a thread reads from it."""
    with suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _open_store(place: RankPlace) -> Store:
    is_host = place.is_host and place.rank == 0
    # Without a socket of ours the store would listen on all interfaces.
    server = socket.create_server((place.address, place.port)).detach() if is_host else None
    store = TCPStore(
        place.address,
        place.port,
        place.size,
        is_master=is_host,
        master_listen_fd=server,
        timeout=timedelta(seconds=_MEETING_S),
        wait_for_workers=False,
    )
    return PrefixStore("baton", store)


def _authenticate(link: Connection, key: bytes) -> tuple[str, int] | None:
    """Returns the kind and the rank of a connection; None if the caller does not prove its key."""
    try:
        deliver_challenge(link, key)
        answer_challenge(link, key)
        kind, rank = link.recv_bytes(_NAME_BYTES).decode().split()
        _limit_answers(link, 0)
        return kind, int(rank)
    except (OSError, EOFError, ValueError, AssertionError, AuthenticationError):
        return None


def _connection(opened: socket.socket) -> Connection:
    opened.setblocking(True)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):  # not on all systems
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    link = Connection(opened.detach())
    _limit_answers(link, _ANSWER_S)
    _limit_unsent(link, _UNSENT_MS)
    return link


def _limit_answers(link: Connection, seconds: int) -> None:
    """Sets the longest wait for a message; 0 for no limit."""
    with socket.socket(fileno=os.dup(link.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _limit_unsent(link: Connection, milliseconds: int) -> None:
    """Sets how long the other side may not take what was sent; 0 for the system's default."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with socket.socket(fileno=os.dup(link.fileno())) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _own_address(link: Connection) -> str:
    with socket.socket(fileno=os.dup(link.fileno())) as end:
        address: str = end.getsockname()[0]
        return address


def _open_gloo(rank: int, size: int, store: Store, own_address: str) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    options._timeout = timedelta(seconds=_MEETING_S)
    gloo = ProcessGroupGloo(store, rank, size, options)
    gloo._set_default_timeout(timedelta(seconds=_LOADING_S))
    return gloo
