"""`SamplingParams` on the wire and back. A leaf module: client, router and workers share it."""

from typing import Any

from baton.sampling_params import SamplingParams
from baton.v1 import common_pb2

__all__ = ["sampling_fields", "sampling_to_proto"]

_EARLY_STOPPING = {
    False: common_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: common_pb2.EARLY_STOPPING_FIRST_FINISHED,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_OF = {number: value for value, number in _EARLY_STOPPING.items()}


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """How tokens are drawn, and how many candidates.

    Raises:
        ValueError: a value that the message cannot hold.
    """
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        n=params.n,
        best_of=params.best_of,
        beam_search=_beam_search(params),
    )


def sampling_fields(message: common_pb2.SamplingParams) -> dict[str, Any]:
    """The fields of `SamplingParams` that the message sets; explicit zeros are set."""
    fields = {field.name: value for field, value in message.ListFields()}
    beam_search: common_pb2.BeamSearch | None = fields.pop("beam_search", None)
    if beam_search is not None:
        fields["beam_width"] = beam_search.beam_width
        # A number of a later build reads like the default.
        fields["early_stopping"] = _EARLY_STOPPING_OF.get(beam_search.early_stopping, False)
        if beam_search.HasField("length_penalty"):
            fields["length_penalty"] = beam_search.length_penalty
    return fields


def _beam_search(params: SamplingParams) -> common_pb2.BeamSearch | None:
    if params.beam_width is None:
        return None
    return common_pb2.BeamSearch(
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=_EARLY_STOPPING[params.early_stopping],
    )
