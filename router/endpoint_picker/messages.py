"""Reads Envoy's messages to an endpoint picker, and makes the answers to them. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from baton.v1 import endpoint_picker_pb2 as pb
from router.http.errors import Problem, anthropic_error, openai_error
from router.http.json_bytes import text_json

__all__ = [
    "DESTINATION",
    "AskedRequest",
    "body_pieces",
    "immediate_answer",
    "naming_answer",
    "read_headers",
    "trailers_answer",
    "unchanged",
]

DESTINATION = "x-gateway-destination-endpoint"
"""Header and key of the metadata that name the server, `ip:port`."""
_LOAD_BALANCER = "envoy.lb"
_SUBSET_HINT = "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"
_MAX_PIECE_BYTES = 62_000
"""Envoy takes pieces of a body of less than 64 KiB."""
_OVERWRITE = pb.EXT_PROC_APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRequest:
    """The headers of a request for which a server is to be chosen.

    Attributes:
        method: in upper case.
        path: without its query.
        headers: by name in lower case; of several with one name, the first.
        subset: servers that may be chosen, each `ip:port` or `ip`; None for all.
    """

    method: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    subset: frozenset[str] | None = None


def read_headers(message: pb.ExtProcRequest) -> AskedRequest:
    """Returns the request whose headers a message has."""
    headers: dict[str, str] = {}
    for header in message.request_headers.headers.headers:
        value = header.raw_value.decode("latin-1") if header.raw_value else header.value
        headers.setdefault(header.key.lower(), value)
    return AskedRequest(
        method=headers.get(":method", "").upper(),
        path=headers.get(":path", "").partition("?")[0],
        headers=headers,
        subset=_subset(message),
    )


def _subset(message: pb.ExtProcRequest) -> frozenset[str] | None:
    """The servers that the gateway allows: a list of texts, or one text with commas."""
    hint = message.metadata_context.filter_metadata.get(_SUBSET_HINT)
    if hint is None or _SUBSET not in hint.fields:
        return None
    value = hint.fields[_SUBSET]
    texts: Iterable[str] = (value.string_value,)
    if value.HasField("list_value"):
        texts = (item.string_value for item in value.list_value.values)
    names = (name.strip() for text in texts for name in text.split(","))
    return frozenset(name for name in names if name)


def naming_answer(part: str, destination: str) -> pb.ExtProcResponse:
    """Returns the answer about a part that sends the request to a server.

    Args:
        part: request_headers or request_body.
        destination: `ip:port`.
    """
    change = pb.ExtProcChange(clear_route_cache=True)
    _set_header(change.header_mutation, DESTINATION, destination)
    response = pb.ExtProcResponse()
    getattr(response, part).response.CopyFrom(change)
    namespace = response.dynamic_metadata.fields[_LOAD_BALANCER].struct_value
    namespace.fields[DESTINATION].string_value = destination
    return response


def unchanged() -> pb.ExtProcPartAnswer:
    """Returns the answer that changes nothing."""
    return pb.ExtProcPartAnswer(response=pb.ExtProcChange())


def trailers_answer() -> pb.ExtProcTrailersAnswer:
    """Returns the answer that leaves trailers as they are."""
    return pb.ExtProcTrailersAnswer(header_mutation=pb.ExtProcHeaderChange())


def body_pieces(body: bytes, *, is_end: bool) -> Iterator[pb.ExtProcPartAnswer]:
    """Yields the answers that let a body go on, of which Envoy keeps no copy.

    Args:
        body: a part of the body.
        is_end: whether nothing follows it.
    """
    starts = range(0, max(len(body), 1), _MAX_PIECE_BYTES)
    for start in starts:
        piece = body[start : start + _MAX_PIECE_BYTES]
        is_last = is_end and start == starts[-1]
        streamed = pb.ExtProcBody(body=piece, end_of_stream=is_last)
        change = pb.ExtProcChange(body_mutation=pb.ExtProcBodyChange(streamed_response=streamed))
        yield pb.ExtProcPartAnswer(response=change)


def immediate_answer(problem: Problem, path: str) -> pb.ExtProcResponse:
    """Returns the answer that ends a request with an error, in the shape of its protocol."""
    fields = (anthropic_error if path.startswith("/v1/messages") else openai_error)(problem)
    answer = pb.ExtProcImmediateAnswer(
        status=pb.ExtProcStatus(code=problem.status),
        body=text_json(fields).encode(),
        details=f"baton_endpoint_picker_{problem.status}",
    )
    for name, value in {"content-type": "application/json", **problem.headers}.items():
        _set_header(answer.headers, name.lower(), value)
    return pb.ExtProcResponse(immediate_response=answer)


def _set_header(change: pb.ExtProcHeaderChange, name: str, value: str) -> None:
    header = pb.ExtProcHeader(key=name, raw_value=value.encode("latin-1", "replace"))
    change.set_headers.append(pb.ExtProcSetHeader(header=header, append_action=_OVERWRITE))
