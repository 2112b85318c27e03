"""Ranks whose processes are started apart, on one or several hosts.

    rank 0       engine, listens; two connections from each other rank: for steps, and for transfers
    rank 1 ...   connect to rank 0, and compute what it sends

The ranks meet through a store of torch at rank 0's address (or their launcher's), in which rank 0
writes the port where it listens. A caller must prove that it knows the cluster's token, and so must
rank 0: messages are pickled. Neither the store nor gloo, which adds up between all ranks, asks for
it or encrypts.
"""

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from itertools import pairwise
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)
from typing_extensions import override

from baton.errors import ConfigurationError
from baton.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.runtime.device import resolve_device
from engine.runtime.ranks.place import RankPlace
from kernels.ranks import GroupEndedError, RankGroup, RanksLostError

__all__ = ["HostRanks", "check_device", "shut_down"]

_MEETING_S = 300.0
"""How long ranks wait for each other when they start: an image may have to be pulled."""
_LOADING_S = 86400.0
"""How long they wait for each other while they load."""
_RETRY_S = 0.2
_CHECK_S = 1.0
_ANSWER_S = 10
_NAME_BYTES = 64
_END = b"end"  # no batch, as these are pickled, and no tokens, which have eight bytes each
_STEPS, _TRANSFERS = "steps", "transfers"
# A host that is cut off is noticed after these times.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_UNSENT_MS = 20_000


class HostRanks(RankGroup):
    """A rank of a group whose processes are started apart.

    Args:
        place: this process's place.
        config: of the engine.
        security: its token is proved by all ranks.

    Attributes:
        transfers: connections for transfers: rank 0's to the others in their order, or the one to
            rank 0.

    Raises:
        ConfigurationError: the ranks did not meet, or there is no token.
    """

    def __init__(
        self, place: RankPlace, config: EngineConfig, security: ClusterSecurity | None
    ) -> None:
        check_device(config)
        self.rank, self.size, self.num_local = place.rank, place.size, place.num_local
        self._limit_s = _LOADING_S
        self._has_started = False
        self._is_closing = False
        self._is_lost = False
        self._on_lost: Callable[[], None] = lambda: None
        try:
            with ExitStack() as opened:
                met = _meet(place, _key_of(place, security), self._check_others, opened)
                opened.pop_all()
        except (OSError, EOFError, RuntimeError, AuthenticationError) as error:
            raise ConfigurationError(
                f"rank {place.rank} of {place.size} did not meet the others at "
                f"{place.address}:{place.port}: {error}"
            ) from error
        self._store, self._gloo, links = met
        self._steps = [link for (kind, _), link in sorted(links.items()) if kind == _STEPS]
        self.transfers = [link for (kind, _), link in sorted(links.items()) if kind == _TRANSFERS]
        self._watchers = [
            threading.Thread(target=self._watch, args=(link,), daemon=True)
            for link in (self._steps if self.rank == 0 else ())
        ]
        for watcher in self._watchers:
            watcher.start()

    @override
    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Adds up the tensors in place, in gloo's order."""
        if partial.numel():
            self._wait(lambda: self._gloo.allreduce([partial]))
        return partial

    @override
    def gather_columns(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        if not len(part):
            return part.new_empty((0, num_columns)) if self.rank == 0 else part
        widest = -(-num_columns // self.size)
        sent = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        if self.rank > 0:
            self._wait(lambda: self._gloo.gather([], sent, 0))
            return part
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        self._wait(lambda: self._gloo.gather(parts, sent, 0))
        ends = [rank * num_columns // self.size for rank in range(self.size + 1)]
        widths = [end - start for start, end in pairwise(ends)]
        own = [columns[:, :width] for columns, width in zip(parts, widths, strict=True)]
        return torch.cat(own, dim=1)

    @override
    def limit_waits(self, timeout_s: float) -> None:
        self._has_started = True
        self._limit_s = timeout_s
        self._gloo._set_default_timeout(timedelta(seconds=timeout_s))

    @override
    def send(self, data: bytes) -> None:
        try:
            for link in self._steps:
                link.send_bytes(data)
        except OSError as error:
            raise self._lost(f"a rank has ended: {error}") from error

    @override
    def receive(self, *, waits_forever: bool = False) -> bytes:
        (link,) = self._steps
        try:
            if not waits_forever and not link.poll(self._limit_s):
                raise self._lost("rank 0 has not answered in time")
            message = link.recv_bytes()
        except (OSError, EOFError) as error:
            raise self._lost(f"rank 0 is lost: {error}") from error
        if message == _END:
            raise GroupEndedError
        return message

    @override
    def abort(self) -> None:
        """Ends the connections, which the other ranks notice; sums fail when the process ends."""
        if not self._is_closing:
            self._is_lost = True
            self._shut_down()

    @override
    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if self.rank == 0 and self._has_started and not self._is_lost:
            with suppress(RanksLostError):
                self.send(_END)
        self._shut_down()
        for watcher in self._watchers:
            watcher.join()
        for link in (*self._steps, *self.transfers):
            link.close()
        del self._gloo, self._store

    def _check_others(self) -> None:
        """Called while rank 0 waits for the others; raises if they will not come."""

    def _shut_down(self) -> None:
        for link in (*self._steps, *self.transfers):
            shut_down(link)

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Registers a function to call when another rank has ended."""
        self._on_lost = on_lost
        if self._is_lost:
            on_lost()

    def _wait(self, start: Callable[[], Any]) -> None:
        if self._is_lost:
            raise RanksLostError("another rank has ended")
        try:
            start().wait()
        except RuntimeError as error:
            raise self._lost(f"another rank is lost: {error}") from error

    def _lost(self, message: str) -> RanksLostError:
        self.abort()
        return RanksLostError(message)

    def _watch(self, link: Connection) -> None:
        """Waits until a rank has ended: the others send nothing by this connection."""
        with suppress(OSError, EOFError):
            link.recv_bytes()
        if not self._is_closing:
            self.abort()
            self._on_lost()


def check_device(config: EngineConfig) -> None:
    """Refuses devices on which several ranks cannot compute yet.

    Raises:
        ConfigurationError: names the flags.
    """
    if resolve_device(config.device).type != "cpu":
        raise ConfigurationError(
            f"--tensor-parallel-size is {config.tensor_parallel_size}; several ranks compute on "
            "CPUs only so far: set --device cpu"
        )


def shut_down(link: Connection) -> None:
    """Ends a connection for both sides, also if a thread reads from it."""
    with suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _key_of(place: RankPlace, security: ClusterSecurity | None) -> bytes:
    token = None if security is None else security.token
    if token is None:
        raise ConfigurationError(
            f"ranks that are started apart meet at {place.address}:{place.port}; `baton prefill` "
            "and `baton decode` do so with a token: set --cluster-token-file or BATON_CLUSTER_TOKEN"
        )
    return token.encode()


def _meet(
    place: RankPlace, key: bytes, check_others: Callable[[], None], opened: ExitStack
) -> tuple[Store, Any, Mapping[tuple[str, int], Connection]]:
    """Connects to the other ranks; returns the store, gloo, and the connections by (kind, rank).

    Args:
        place: this process's.
        key: what both sides of a connection prove to know.
        check_others: called while ranks are missing; raises if they will not come.
        opened: gets what must be closed.
    """
    deadline = time.monotonic() + _MEETING_S
    store = _open_store(place)
    links: dict[tuple[str, int], Connection] = {}
    opened.callback(_close_all, links)
    if place.rank == 0:
        attempt = secrets.token_hex(8)
        _accept(place, store, key, attempt, deadline, check_others, links)
    else:
        attempt = _connect(place, store, key, deadline, links)
    own_address = _own_address(links[_STEPS, max(place.rank, 1)])
    return store, _open_gloo(place, PrefixStore(attempt, store), own_address), links


def _close_all(links: dict[tuple[str, int], Connection]) -> None:
    for link in links.values():
        link.close()
    links.clear()


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


def _accept(
    place: RankPlace,
    store: Store,
    key: bytes,
    attempt: str,
    deadline: float,
    check_others: Callable[[], None],
    links: dict[tuple[str, int], Connection],
) -> None:
    """Accepts two connections from each other rank, and adds them to `links`.

    A launcher's store outlives a group, so the port is named with the attempt.
    """
    wanted = {(kind, rank) for kind in (_STEPS, _TRANSFERS) for rank in range(1, place.size)}
    with closing(socket.create_server((place.address, 0))) as server:
        store.set("port", f"{server.getsockname()[1]} {attempt}")
        server.settimeout(_CHECK_S)
        while wanted - links.keys():
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
            check_others()
            with suppress(TimeoutError):
                link = _connection(server.accept()[0])
                found = _authenticate(link, key)
                if found not in wanted:
                    link.close()  # no rank of this group
                    continue
                if found in links:  # of a process that has ended since
                    links[found].close()
                links[found] = link
    for link in links.values():
        link.send_bytes(attempt.encode())


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


def _connect(
    place: RankPlace,
    store: Store,
    key: bytes,
    deadline: float,
    links: dict[tuple[str, int], Connection],
) -> str:
    """Connects twice to rank 0, adds the connections to `links`, and returns rank 0's attempt."""
    while True:
        port, attempt = store.get("port").decode().split()
        try:
            for kind in (_STEPS, _TRANSFERS):
                links[kind, place.rank] = _open_link(place, int(port), key, kind)
            for link in links.values():
                _limit_answers(link, int(max(deadline - time.monotonic(), 1)))
                if link.recv_bytes(_NAME_BYTES).decode() != attempt:
                    raise ConnectionError("rank 0 has begun again")
                _limit_answers(link, 0)
            return attempt
        except (OSError, EOFError):  # the port may be that of a group that has ended
            _close_all(links)
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def _open_link(place: RankPlace, port: int, key: bytes, kind: str) -> Connection:
    link = _connection(socket.create_connection((place.address, port), _ANSWER_S))
    answer_challenge(link, key)
    deliver_challenge(link, key)
    link.send_bytes(f"{kind} {place.rank}".encode())
    return link


def _connection(opened: socket.socket) -> Connection:
    opened.setblocking(True)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _UNSENT_MS)):
        if hasattr(socket, name):  # not on all systems
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    link = Connection(opened.detach())
    _limit_answers(link, _ANSWER_S)
    return link


def _limit_answers(link: Connection, seconds: int) -> None:
    """Sets the longest wait for a message; 0 for no limit."""
    with socket.socket(fileno=os.dup(link.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _own_address(link: Connection) -> str:
    with socket.socket(fileno=os.dup(link.fileno())) as end:
        address: str = end.getsockname()[0]
        return address


def _open_gloo(place: RankPlace, store: Store, own_address: str) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    options._timeout = timedelta(seconds=_MEETING_S)
    gloo = ProcessGroupGloo(store, place.rank, place.size, options)
    gloo._set_default_timeout(timedelta(seconds=_LOADING_S))
    return gloo
