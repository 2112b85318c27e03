"""Requests for engines, made from flat fields."""

from dataclasses import fields, replace

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from engine.request import EngineRequest

__all__ = ["changed", "engine_request"]

_SPEC_FIELDS = {field.name for field in fields(RequestSpec)}
_PARAMS_FIELDS = {field.name for field in fields(SamplingParams)} - _SPEC_FIELDS


def engine_request(
    request_id: str, prompt_token_ids: tuple[int, ...], **changes: object
) -> EngineRequest:
    """Returns a greedy request with some fields of it, of its spec or of its params set."""
    params = SamplingParams(temperature=0.0, seed=0)
    spec = RequestSpec(request_id=request_id, prompt_token_ids=prompt_token_ids, params=params)
    return changed(EngineRequest(spec=spec), **changes)


def changed(request: EngineRequest, **changes: object) -> EngineRequest:
    """Returns the request with some fields of it, of its spec or of its params replaced.

    `stop_token_ids` is the field of the spec.
    """
    fields = {name: changes.pop(name) for name in list(changes) if name in _PARAMS_FIELDS}
    params = replace(request.spec.params, **fields)
    fields = {name: changes.pop(name) for name in list(changes) if name in _SPEC_FIELDS}
    return replace(request, spec=replace(request.spec, params=params, **fields), **changes)
