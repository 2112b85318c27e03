"""The parameters of a request from what it states, and from the defaults of the served model."""

from collections.abc import Mapping
from typing import Any

from baton.common.request.sampling_params import SamplingParams

__all__ = ["over_defaults", "stated_params"]


def stated_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a caller's mapping that state a value. None states nothing, except for
    `max_tokens`: there it stands for as many tokens as fit.
    """
    return {
        name: value for name, value in params.items() if value is not None or name == "max_tokens"
    }


def over_defaults(stated: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """The parameters that are stated, and defaults for the others.

    Args:
        stated: values by field.
        defaults: those of the served model. A beam search takes only `max_tokens` from it:
            the others are for drawing tokens, and a beam search refuses some of them. A default
            of `max_tokens` is no less than a `min_tokens` that is stated.

    Raises:
        InvalidArgumentError: a value is out of range; names the field.
        TypeError: a field that `SamplingParams` does not have.
    """
    if stated.get("beam_width") is not None:
        defaults = {name: defaults[name] for name in defaults.keys() & {"max_tokens"}}
    least = stated.get("min_tokens")
    if "max_tokens" in defaults and isinstance(least, int):
        defaults = {**defaults, "max_tokens": max(defaults["max_tokens"], least)}
    return SamplingParams(**{**defaults, **stated})
