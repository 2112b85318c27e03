"""`Registration`: announces a worker or a replica set to routers, while it serves."""

import argparse
import asyncio
import ipaddress
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc
from typing_extensions import override

from baton.common.addresses import join_host_port, reachable_host, split_host_port
from baton.common.errors import BatonError, ConfigurationError, InvalidArgumentError
from baton.common.flags.config_flags import add_flags, flag
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import registration_pb2, registration_pb2_grpc
from rpc.cancellation import is_task_cancelled
from rpc.discovery.announced import MODEL_LABEL, ROLE_LABEL
from rpc.discovery.announcements import check_labels
from rpc.discovery.discovery import Discovery
from rpc.errors import from_rpc_error
from rpc.server import Service
from rpc.server_access import open_cluster_channel
from rpc.server_config import ServerConfig

__all__ = ["RegisteredService", "Registration", "RegistrationConfig", "add_registration_args"]

_LOGGER = logging.getLogger("baton.worker")
_CALL_TIMEOUT_S = 5.0
_WITHDRAW_TIMEOUT_S = 1.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_MIN_RENEWAL_S = 0.1
_RENEWALS_PER_LEASE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationConfig:
    """The flags of a worker that announces itself to routers.

    Raises:
        ConfigurationError: a value is malformed, or needs --register-with; names the flag.
    """

    register_with: tuple[str, ...] = flag(
        (),
        "routers to which this process announces itself, for their targets register:///: host:port "
        "of the gRPC port, dns:///name:port for all addresses of a DNS name, "
        "file:///path or k8s:///namespace/service:port; comma-separated, repeatable",
        metavar="TARGET",
    )
    advertise_address: str | None = flag(
        None,
        "host, or host:port, at which routers reach this process (default: --host and --port; the "
        "machine's own address if --host is all addresses)",
        metavar="HOST",
    )
    label: tuple[str, ...] = flag(
        (),
        "NAME=VALUE, by which targets of routers select; comma-separated, repeatable. `model` and "
        "`role` are stated anyway",
        metavar="LABEL",
    )

    def __post_init__(self) -> None:
        if not self.register_with:
            for name in ("advertise_address", "label"):
                if getattr(self, name):
                    raise ConfigurationError(
                        f"--{name.replace('_', '-')} is for announcements; set --register-with, too"
                    )
        Discovery(self.register_with)
        _ = self.labels
        if self.advertise_address is not None:
            _join_address(self.advertise_address, 1)

    @property
    def labels(self) -> Mapping[str, str]:
        """The values of `label`, by name.

        Raises:
            ConfigurationError: one is malformed, or a name is stated twice or by Baton.
        """
        labels: dict[str, str] = {}
        for text in self.label:
            name, equals, value = text.partition("=")
            if not equals or name in labels or name in (MODEL_LABEL, ROLE_LABEL):
                raise ConfigurationError(
                    f"--label {text!r} must be NAME=VALUE, with a name that is not stated yet"
                )
            labels[name] = value
        try:
            check_labels({MODEL_LABEL: "", ROLE_LABEL: "", **labels})
        except InvalidArgumentError as error:
            raise ConfigurationError(f"--label: {error.message}") from None
        return labels

    def address(self, server: ServerConfig, port: int) -> str:
        """The address to announce.

        Args:
            server: where the process listens.
            port: the port that it has bound.

        Raises:
            ConfigurationError: the machine's own address cannot be found.
        """
        if self.advertise_address is not None:
            return _join_address(self.advertise_address, port)
        try:
            return join_host_port(reachable_host(server.host), port)
        except OSError:
            raise ConfigurationError(
                "this machine's own address cannot be found; set --advertise-address"
            ) from None


def _join_address(text: str, port: int) -> str:
    """Returns `host:port` of a text that may lack the port.

    Raises:
        ConfigurationError: it is neither a host nor an address.
    """
    try:
        return join_host_port(str(ipaddress.ip_address(text)), port)
    except ValueError:
        address = text if split_host_port(text) else f"{text}:{port}"
    if split_host_port(address) is None or (":" in text and address != text):
        raise ConfigurationError(f"--advertise-address {text!r} must be HOST or HOST:PORT")
    return address


def add_registration_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a worker that announces itself."""
    add_flags(parser, RegistrationConfig, "server")


class Registration:
    """Announces one address to all routers of some targets, and renews each lease.

    Args:
        targets: the routers.
        address: `host:port` of the worker or the set.
        labels: returns what to state with the address now.
        security: what this process shows to routers.

    Raises:
        ConfigurationError: a target is malformed.
    """

    def __init__(
        self,
        targets: Sequence[str],
        address: str,
        labels: Callable[[], Mapping[str, str]],
        security: ClusterSecurity,
    ) -> None:
        self._address = address
        self._labels = labels
        self._security = security
        self._routers = Discovery(targets)
        self._changed = asyncio.Event()
        self._routers.on_change(self._changed.set)
        self._announcing: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Announces the address until cancelled, and withdraws it then."""
        following = asyncio.create_task(self._routers.run())
        try:
            while True:
                self._changed.clear()
                for router in self._routers.addresses - self._announcing.keys():
                    self._announcing[router] = asyncio.create_task(self._announce(router))
                await self._changed.wait()
        finally:
            tasks = (following, *self._announcing.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _announce(self, router: str) -> None:
        """Announces the address to one router while targets list it; after that, while it answers,
        since DNS answers vary.
        """
        backoff_s, reported = _FIRST_BACKOFF_S, ""
        try:
            while True:
                num_announced, problem = await self._announce_once(router)
                if num_announced:
                    backoff_s, reported = _FIRST_BACKOFF_S, ""
                if problem != reported:
                    reported = problem
                    _LOGGER.warning("not announced to router %s: %s", router, reported)
                if router not in self._routers.addresses:
                    return
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        finally:
            del self._announcing[router]

    async def _announce_once(self, router: str) -> tuple[int, str]:
        """Announces the address over one connection; returns how often that succeeded, and what
        ended it. Whatever it was, another connection is tried: a worker that is not announced gets
        no requests.
        """
        host = self._routers.name_of(router)
        try:
            async with open_cluster_channel(router, self._security, host) as channel:
                num_announced, error = await self._renew(router, channel)
            return num_announced, error.message
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            return 0, "the call was cancelled"
        except Exception as error:
            _LOGGER.debug("announcements to router %s", router, exc_info=True)
            return 0, f"{type(error).__name__}: {error}"

    async def _renew(self, router: str, channel: grpc.aio.Channel) -> tuple[int, BatonError]:
        """Announces the address over one connection again and again; returns how often that
        succeeded, and what ended it.
        """
        stub = registration_pb2_grpc.RegistrationServiceStub(channel)
        request = registration_pb2.AnnounceRequest(address=self._address)
        num_announced = 0
        try:
            while True:
                request.labels.clear()
                request.labels.update(self._labels())
                response = await stub.Announce(
                    request, timeout=_CALL_TIMEOUT_S, metadata=self._security.call_metadata()
                )
                if not num_announced:
                    _LOGGER.info("announced %s to router %s", self._address, router)
                num_announced += 1
                renewal_s = response.lease_ms / 1000 / _RENEWALS_PER_LEASE
                await asyncio.sleep(max(renewal_s, _MIN_RENEWAL_S) * random.uniform(0.8, 1.0))
        except grpc.aio.AioRpcError as error:
            return num_announced, from_rpc_error(error)
        except asyncio.CancelledError:
            if num_announced and is_task_cancelled():
                await self._withdraw(stub)
            raise

    async def _withdraw(self, stub: "registration_pb2_grpc.RegistrationServiceAsyncStub") -> None:
        request = registration_pb2.WithdrawRequest(address=self._address)
        metadata = self._security.call_metadata()
        with suppress(grpc.aio.AioRpcError):  # the lease ends by itself
            await stub.Withdraw(request, timeout=_WITHDRAW_TIMEOUT_S, metadata=metadata)


class RegisteredService(Service):
    """A service that is announced to routers from now until its drain begins.

    Args:
        service: the service.
        registration: announces it.
    """

    def __init__(self, service: Service, registration: Registration) -> None:
        self._service = service
        self._announcing = asyncio.create_task(registration.run())

    @classmethod
    def of(
        cls,
        service: Service,
        config: RegistrationConfig,
        address: str,
        labels: Callable[[], Mapping[str, str]],
        security: ClusterSecurity,
    ) -> Service:
        """Returns a service that is announced, or the service itself if no router is named.

        Args:
            service: the service.
            config: the flags.
            address: what routers are to call.
            labels: returns the worker's own labels now: its model and its role.
            security: what this process shows to routers.
        """
        if not config.register_with:
            return service
        stated = config.labels
        registration = Registration(
            config.register_with, address, lambda: {**stated, **labels()}, security
        )
        return cls(service, registration)

    @override
    def announce_stop(self) -> None:
        self._service.announce_stop()

    @override
    async def drain(self, timeout_s: float) -> None:
        await self._end()
        await self._service.drain(timeout_s)

    @override
    async def close(self) -> None:
        await self._end()
        await self._service.close()

    async def _end(self) -> None:
        self._announcing.cancel()
        await asyncio.gather(self._announcing, return_exceptions=True)
