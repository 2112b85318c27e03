"""`RegistrationServicer`: RegistrationService, by which workers announce themselves."""

from typing import Any, Protocol

from typing_extensions import override

from baton.v1 import registration_pb2, registration_pb2_grpc
from rpc.discovery.announcements import Announcements

__all__ = ["RegistrationRelay", "RegistrationServicer"]


class RegistrationRelay(Protocol):
    """Informs the other processes of a router, each of which has its own announcements."""

    async def announce(self, request: registration_pb2.AnnounceRequest) -> None:
        """Passes an announcement on. One that does not answer gets the next renewal."""

    async def withdraw(self, request: registration_pb2.WithdrawRequest) -> None:
        """Passes a withdrawal on."""


class RegistrationServicer(registration_pb2_grpc.RegistrationServiceServicer):
    """The service; `protos/baton/v1/registration.proto` documents the methods.

    Args:
        announcements: gets the workers.
        relay: informs other processes; None if there are none, or if they know already.
    """

    def __init__(
        self, announcements: Announcements, relay: RegistrationRelay | None = None
    ) -> None:
        self._announcements = announcements
        self._relay = relay

    @override
    async def Announce(
        self, request: registration_pb2.AnnounceRequest, context: Any
    ) -> registration_pb2.AnnounceResponse:
        self._announcements.announce(request.address, dict(request.labels))
        if self._relay is not None:
            await self._relay.announce(request)
        lease_ms = round(self._announcements.lease_s * 1000)
        return registration_pb2.AnnounceResponse(lease_ms=lease_ms)

    @override
    async def Withdraw(
        self, request: registration_pb2.WithdrawRequest, context: Any
    ) -> registration_pb2.WithdrawResponse:
        self._announcements.withdraw(request.address)
        if self._relay is not None:
            await self._relay.withdraw(request)
        return registration_pb2.WithdrawResponse()
