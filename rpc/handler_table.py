"""`HandlerTable`: the methods of a gRPC server that listens before its service has started."""

from collections.abc import Sequence
from typing import Any

import grpc

from baton.common.errors import Reason, UnavailableError

__all__ = ["HandlerTable"]


class HandlerTable(grpc.GenericRpcHandler):
    """Method handlers that can be added after the server has started.

    Passed instead of the server to the generated `add_…Servicer_to_server`. Until
    the first handler is added, calls of the named services get UNAVAILABLE.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._service_names = frozenset(service_names)
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, Any] = {}  # handlers that were called, by their methods

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Adds the handlers of one service."""
        self._handlers.extend(handlers)
        self._found.clear()

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        """Ignores the handlers: the generated code passes the same ones to both methods."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Returns the handler of a method; None for an unknown method."""
        method = str(handler_call_details.method)
        if method in self._found:
            return self._found[method]
        if not self._handlers and self._is_expected(method):
            # On the wire unary calls are streams of one message, so this handler fits any method.
            return grpc.stream_stream_rpc_method_handler(_refuse)
        for handlers in self._handlers:
            if (handler := handlers.service(handler_call_details)) is not None:
                self._found[method] = handler
                return handler
        return None

    def _is_expected(self, method: str) -> bool:
        return method.strip("/").partition("/")[0] in self._service_names


async def _refuse(requests: Any, context: Any) -> None:
    raise UnavailableError("the server is starting", reason=Reason.SERVER_STARTING)
