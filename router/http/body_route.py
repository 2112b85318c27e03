"""`BodyRoute`: endpoints whose bodies are parsed and checked off the event loop if they are large.

FastAPI alone parses and checks bodies on the event loop, and keeps both forms of a body until the
answer has ended. Its own way to an endpoint, with dependencies and two stacks of contexts, takes
longer than all that the router adds to a request.
"""

from collections.abc import Callable
from functools import cached_property
from typing import ParamSpec, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from router.requests.input_threads import convert_input
from router.requests.json_input import parse_json

__all__ = ["BodyRoute", "body_parsed", "convert_body"]

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class BodyRoute(APIRoute):
    """A route whose endpoint has the arguments `body`, which the request's JSON makes, and
    `request`. It has no dependencies, and returns a response.
    """

    @cached_property
    def _kind(self) -> type[BaseModel]:
        """The type of the body."""
        kind: type[BaseModel] = get_type_hints(self.endpoint)["body"]
        return kind

    @override
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.methods and scope["method"] not in self.methods:
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive)
        received = (await receive()).get("body", b"")
        request.state.num_body_bytes = len(received)
        body = await convert_input(len(received), _parsed, self._kind, received)
        del received
        body_parsed(request)
        response = await self.endpoint(body=body, request=request)
        await response(scope, receive, send)


async def convert_body(
    request: Request,
    convert: Callable[_P, _Result],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _Result:
    """Returns the result of a conversion of a request's body, made off the event loop if the body
    is large.
    """
    return await convert_input(request.state.num_body_bytes, convert, *args, **kwargs)


def body_parsed(request: Request) -> None:
    """Says that the bytes of the body are no longer needed; see `RequestMiddleware`."""
    release = getattr(request.state, "release_body", None)
    if release is not None:
        release()


def _parsed(kind: type[BaseModel], received: bytes) -> BaseModel:
    """The object that a body stands for.

    Raises:
        InvalidArgumentError: the body is not JSON, or too large.
        RequestValidationError: a field is wrong, or there is no body.
    """
    if not received:
        lacking = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
        raise RequestValidationError([lacking])
    value = parse_json("the body", received)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in errors]
        ) from None
