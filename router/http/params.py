"""From request bodies to the stated fields of `SamplingParams`; bodies that ask for one answer."""

import time
from typing import Any

from starlette.requests import Request

from baton.common.errors import DeadlineExceededError, InvalidArgumentError
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.structured_outputs import StructuredOutputs
from router.http.bodies import Array, JsonObject, SamplingBody, refuse_lacking
from rpc.logs import CURRENT_CALL

__all__ = ["AnswerBody", "request_id_of", "sampling_of", "stated_fields", "timeout_of"]

_OF_BEAMS = ("length_penalty", "early_stopping")
_SAME_NAMES = tuple(
    name
    for name in SamplingParams.__slots__
    if name in SamplingBody.model_fields and name not in (*_OF_BEAMS, "structured_outputs")
)
_TIMEOUT_HEADER = "x-request-timeout-s"
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_HAVE_NO_PLACE = ("use_beam_search", "prompt_logprobs", "echo", "return_token_ids")
_ONE_ANSWER = ("n", "best_of")


def stated_fields(body: SamplingBody) -> dict[str, Any]:
    """The fields of `SamplingParams` that a body states.

    Raises:
        InvalidArgumentError: a field is set that this server lacks, or two that exclude each
            other.
    """
    refuse_lacking(body)
    stated = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    if stated.get("seed", 0) < 0:
        stated |= _seed_from_signed(stated.pop("seed"))
    if body.vllm_xargs is not None:
        stated["extra_args"] = body.vllm_xargs
    if body.use_beam_search:
        stated |= _beam_search(body, stated)
    outputs = _structured_outputs(body)
    if outputs is not None:
        stated["structured_outputs"] = outputs
    return stated


def _seed_from_signed(seed: int) -> dict[str, int]:
    """Returns the seed of a request as an unsigned number. -1 states no seed, as in vLLM."""
    if seed == -1:
        return {}
    return {"seed": seed + 2**64 if seed >= -(2**63) else seed}


def _beam_search(body: SamplingBody, stated: dict[str, Any]) -> dict[str, Any]:
    """The fields of a beam search, whose width is the number of candidates, as in vLLM."""
    fields = {"beam_width": stated.pop("best_of", None) or stated.get("n") or 1}
    for name in _OF_BEAMS:
        value = getattr(body, name)
        if value is not None:
            fields[name] = value
    return fields


def _structured_outputs(body: SamplingBody) -> StructuredOutputs | None:
    """The form of the text, which one field at most may state."""
    guided = {form: value for name, form in _GUIDED.items() if (value := getattr(body, name))}
    given = {
        "response_format": body.response_format,
        "structured_outputs": body.structured_outputs,
        "guided_*": guided or None,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidArgumentError(f"{names[0]} is set together with {names[1]}; set one of them")
    if body.response_format is not None:
        return StructuredOutputs.of_response_format(body.response_format)
    if body.structured_outputs is not None:
        stated = {k: v for k, v in body.structured_outputs.items() if v is not None}
        return StructuredOutputs.of(stated)
    if not guided:
        return None
    return StructuredOutputs(**guided, whitespace_pattern=body.guided_whitespace_pattern)


def request_id_of(request: Request, body: SamplingBody) -> str:
    """The id that a request runs under: the body's, else that of the HTTP request."""
    return body.request_id or str(request.state.request_id)


def timeout_of(request: Request) -> float | None:
    """Seconds left until the deadline that the client states in a header, counted from the arrival
    of its headers; None if it states none.

    Raises:
        InvalidArgumentError: the header is no positive number.
        DeadlineExceededError: the deadline has passed.
    """
    text = request.headers.get(_TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not timeout_s > 0:
        raise InvalidArgumentError.for_field("X-Request-Timeout-S", text[:64], "a number > 0")
    call = CURRENT_CALL.get()
    left_s = timeout_s - (time.monotonic() - call.started_at if call else 0.0)
    if left_s <= 0:
        raise DeadlineExceededError(f"the request was not read within {timeout_s:g} s")
    return left_s


class AnswerBody(SamplingBody):
    """A request for one answer to a conversation, with vLLM's further fields.

    Attributes:
        chat_template_kwargs: further variables of the chat template.
        documents: documents for templates that read them.
    """

    chat_template_kwargs: JsonObject | None = None
    documents: Array[JsonObject] | None = None


def sampling_of(body: AnswerBody) -> dict[str, Any]:
    """Returns the stated sampling parameters.

    Raises:
        InvalidArgumentError: a field is set that Baton lacks, or for which the API's answers
            have no place; names it.
    """
    for name in _ONE_ANSWER:
        if getattr(body, name) not in (None, 1):
            raise InvalidArgumentError.for_field(name, getattr(body, name), "1 in this API")
    for name in _HAVE_NO_PLACE:
        if getattr(body, name) not in (None, False):
            raise InvalidArgumentError(
                f"{name} is set, but answers of this API have no place for it"
            )
    return stated_fields(body)
