"""`RegistrationServicer`: RegistrationService, by which workers announce themselves."""

from typing import Any

from typing_extensions import override

from baton.v1 import registration_pb2, registration_pb2_grpc
from rpc.discovery.announcements import Announcements

__all__ = ["RegistrationServicer"]


class RegistrationServicer(registration_pb2_grpc.RegistrationServiceServicer):
    """The service; `protos/baton/v1/registration.proto` documents the methods.

    Args:
        announcements: gets the workers.
    """

    def __init__(self, announcements: Announcements) -> None:
        self._announcements = announcements

    @override
    async def Announce(
        self, request: registration_pb2.AnnounceRequest, context: Any
    ) -> registration_pb2.AnnounceResponse:
        self._announcements.announce(request.address, dict(request.labels))
        lease_ms = round(self._announcements.lease_s * 1000)
        return registration_pb2.AnnounceResponse(lease_ms=lease_ms)

    @override
    async def Withdraw(
        self, request: registration_pb2.WithdrawRequest, context: Any
    ) -> registration_pb2.WithdrawResponse:
        self._announcements.withdraw(request.address)
        return registration_pb2.WithdrawResponse()
