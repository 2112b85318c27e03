"""`BodyRoute`: endpoints whose bodies are parsed and checked off the event loop if they are large.

FastAPI alone parses and checks bodies on the event loop, and keeps both forms of a body until the
answer has ended.
"""

from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from router.requests.input_threads import convert_input
from router.requests.json_input import parse_json

__all__ = ["BodyRoute", "body_parsed", "convert_body"]

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class BodyRoute(APIRoute):
    """A route whose endpoint has an argument `body`, which the request's JSON makes."""

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind: type[BaseModel] = get_type_hints(self.endpoint)["body"]

        async def parse_and_handle(request: Request) -> Response:
            received = (await request.receive()).get("body", b"")
            if not received:
                return await handle(_ParsedRequest(request, None))
            request.state.num_body_bytes = len(received)
            body = await convert_input(len(received), _parsed, kind, received)
            del received
            body_parsed(request)
            return await handle(_ParsedRequest(request, body))

        return parse_and_handle


class _ParsedRequest(Request):
    """A request with the object that its body stands for, which FastAPI takes as it is."""

    def __init__(self, request: Request, body: BaseModel | None) -> None:
        super().__init__(request.scope, request.receive)
        self._parsed = body

    @override
    async def body(self) -> bytes:
        """Bytes from which FastAPI sees whether there is a body."""
        return b"" if self._parsed is None else b"{}"

    @override
    async def json(self) -> Any:
        return self._parsed


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
        RequestValidationError: a field is wrong.
    """
    value = parse_json("the body", received)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in errors]
        ) from None
