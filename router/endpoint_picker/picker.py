"""`EndpointPicker`: chooses the server of a request as the router chooses a decode replica.

A server is a router in the pod of a decode worker, so it has the worker's address and a port that
all of them share. What the picker cannot read, such as a body that is no JSON or a key of nobody,
goes to the server with the least load, whose router answers it in the shape of its own protocol.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import replace

from baton.common.errors import (
    BatonError,
    FailedPreconditionError,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
)
from router.endpoint_picker.exchange import Picked, RefusedError
from router.endpoint_picker.messages import AskedRequest
from router.endpoint_picker.servers import Servers
from router.http.errors import Problem, problem_of
from router.http.prompt_reader import PROMPT_PATHS, PromptReader
from router.models import Model, Models
from router.requests.request import RoutedRequest
from router.stages.picking import PickedReplica
from router.tenants.tenants import Tenants, credentials_of
from rpc.call_sessions import session_from
from rpc.logs import CallInfo, serving

__all__ = ["EndpointPicker"]

_LOGGER = logging.getLogger("baton.router")
_READ_TIMEOUT_S = 10.0
"""For the prompt of a request; after it, the load decides."""
_TOO_MANY_REQUESTS = 429


class EndpointPicker:
    """Chooses servers.

    Args:
        models: the served models.
        tenants: the clients, whose cached prompts are apart.
        servers: the servers beside the models' decode workers.
        timeout_s: after so long, no request counts as a server's load.
    """

    def __init__(
        self, models: Models, tenants: Tenants, servers: Servers, timeout_s: float
    ) -> None:
        self._models = models
        self._tenants = tenants
        self._reader = PromptReader(models)
        self._servers = servers
        self._timeout_s = timeout_s

    @staticmethod
    def uses_body(asked: AskedRequest) -> bool:
        """Whether a request's body has a prompt."""
        return asked.method == "POST" and asked.path in PROMPT_PATHS

    async def pick(self, asked: AskedRequest, body: bytes | None) -> Picked:
        """Chooses the server of a request.

        Args:
            asked: its headers.
            body: its body; None if that is not known, or has no prompt.

        Raises:
            RefusedError: no server is ready (503), or all are full (429).
        """
        deadline = time.monotonic() + self._timeout_s
        read = None if body is None else await self._read(asked, body, deadline)
        try:
            picked = self._pick(asked.subset, read, deadline)
        except (UnavailableError, ResourceExhaustedError) as error:
            raise RefusedError(_problem(error)) from error
        endpoint = self._servers.endpoint(picked.address)
        assert endpoint is not None, "only replicas with an endpoint may be chosen"
        return Picked(endpoint, picked.release)

    async def _read(
        self, asked: AskedRequest, body: bytes, deadline: float
    ) -> tuple[Model, RoutedRequest] | None:
        """Returns the model of a request, and its prompt; None if it cannot be read."""
        headers = asked.headers
        credentials = credentials_of(headers.get("authorization"), headers.get("x-api-key"))
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                caller = self._tenants.find(credentials)
                with serving(CallInfo(caller=caller, session=session_from(headers.items()))):
                    model, request = await self._reader.read(asked.path, body)
                    return model, await model.picking.route(request, deadline)
        except (BatonError, TimeoutError) as error:
            _LOGGER.debug("picks by load, as the request cannot be read: %s", error)
            return None

    def _pick(
        self,
        subset: frozenset[str] | None,
        read: tuple[Model, RoutedRequest] | None,
        deadline: float,
    ) -> PickedReplica:
        def answers(address: str) -> bool | None:
            endpoint = self._servers.endpoint(address)
            if endpoint is None or not _is_in(subset, endpoint):
                return None
            return self._servers.answers(endpoint)

        models: Iterable[Model] = self._models
        if read is not None:
            model, request = read
            models = (model,)
            try:
                return model.picking.pick(request, answers)
            except FailedPreconditionError:
                _LOGGER.debug("picks by load, as no replica can hold the request")
        *others, last = models
        for model in others:
            try:
                return model.picking.pick_least_loaded(deadline, answers)
            except UnavailableError:
                continue
        return last.picking.pick_least_loaded(deadline, answers)


def _is_in(subset: frozenset[str] | None, endpoint: str) -> bool:
    """Whether a server is one of those that a proxy allows, by `ip:port` or by address."""
    host = endpoint.rpartition(":")[0].strip("[]")
    return subset is None or endpoint in subset or host in subset


def _problem(error: UnavailableError | ResourceExhaustedError) -> Problem:
    problem = problem_of(error, "")
    if error.reason == Reason.REPLICAS_FULL:
        return replace(problem, status=_TOO_MANY_REQUESTS, kind="rate_limit_error")
    return problem
