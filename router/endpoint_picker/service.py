"""`PickerService`: the gRPC server on which Envoy asks for the server of each request."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

import grpc

from baton.common.errors import DeadlineExceededError, Reason
from baton.v1 import endpoint_picker_pb2 as pb
from router.config.router import RouterConfig
from router.endpoint_picker.exchange import Exchange, HeldBytes
from router.endpoint_picker.picker import EndpointPicker
from router.endpoint_picker.servers import Servers
from router.models import Models
from router.security import RouterSecurity
from rpc.channels import MAX_MESSAGE_BYTES
from rpc.server import RpcServer

__all__ = ["EXT_PROC_SERVICE", "PickerService"]

EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_MAX_BODIES = 16
"""How many bodies of the largest size may wait for a choice at once."""
_SLACK_S = 30.0
"""The picker waits longer than the server, whose own answer says that a deadline has passed."""


class PickerService:
    """Answers Envoy.

    Args:
        config: the router's; it has a port for the picker.
        models: the served models.
        security: the certificates of the port, and the clients of the requests.
        shares_port: whether other processes listen at the port too.

    Attributes:
        server: the server.
        servers: the routers that it names; the caller runs their checks.
    """

    def __init__(
        self,
        config: RouterConfig,
        models: Models,
        security: RouterSecurity,
        *,
        shares_port: bool = False,
    ) -> None:
        most_bytes = config.http.max_request_bytes
        self._held = HeldBytes(most_bytes, _MAX_BODIES * most_bytes)
        self._body_timeout_s = config.http.body_timeout_s
        self._answer_timeout_s = config.default_timeout_s + _SLACK_S

        def read_addresses() -> Iterable[str]:
            return (r.address for model in models for r in model.fleet.decode.candidates)

        self.servers = Servers(
            read_addresses,
            config.picker.endpoint_port,
            has_tls=security.certificates is not None,
        )
        self._picker = EndpointPicker(
            models, security.tenants, self.servers, config.default_timeout_s
        )
        access = replace(
            security.proxy_access(),
            max_concurrent_calls=config.most_calls,
            # In the mode BUFFERED a body is one message.
            max_message_bytes=most_bytes + MAX_MESSAGE_BYTES,
            send_timeout_s=config.http.send_timeout_s,
            shares_port=shares_port,
        )
        own = replace(config.grpc, port=config.picker.endpoint_picker_port, port_file=None)
        self.server = RpcServer(own, (EXT_PROC_SERVICE,), access)
        handler = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=pb.ExtProcRequest.FromString,
            response_serializer=pb.ExtProcResponse.SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {"Process": handler})
        self.server.add_servicer(lambda _, table: table.add_generic_rpc_handlers((generic,)), self)

    async def process(
        self, requests: AsyncIterator[pb.ExtProcRequest], context: Any
    ) -> AsyncIterator[pb.ExtProcResponse]:
        """Answers the messages about one HTTP request.

        Raises:
            InvalidArgumentError: a message is malformed.
            DeadlineExceededError: the body that a choice needs did not come in time.
        """
        exchange = Exchange(self._picker.pick, self._picker.uses_body, self._held)
        body_deadline = asyncio.get_running_loop().time() + self._body_timeout_s
        with closing(exchange):
            while (message := await self._next(requests, exchange, body_deadline)) is not None:
                for answer in await exchange.take(message):
                    yield answer

    async def _next(
        self, requests: AsyncIterator[pb.ExtProcRequest], exchange: Exchange, body_deadline: float
    ) -> pb.ExtProcRequest | None:
        """Returns Envoy's next message; None after the last one, or if none comes although the
        server is named. An error would then take the place of the server's answer.
        """
        answer_deadline = asyncio.get_running_loop().time() + self._answer_timeout_s
        try:
            async with asyncio.timeout_at(
                answer_deadline if exchange.is_decided else body_deadline
            ):
                return await anext(requests, None)
        except TimeoutError:
            if exchange.is_decided:
                return None
            raise DeadlineExceededError(
                f"the body of the request did not arrive within {self._body_timeout_s:g} s",
                reason=Reason.REQUEST_NOT_RECEIVED,
            ) from None
