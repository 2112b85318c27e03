"""Rotary embeddings as config.json describes them: one for all layers, or one per layer type."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.models.config_fields import (
    MAX_TOKENS,
    ConfigFieldError,
    ConfigFields,
    positive,
    unsupported,
    wrong,
)

__all__ = ["RopeConfig", "read_rope", "read_ropes_by_type"]

_ORIGINAL_LEN = "original_max_position_embeddings"
_FACTORS = ("short_factor", "long_factor")
_NEEDED_BY_TYPE = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL_LEN),
    "yarn": ("factor", _ORIGINAL_LEN),
    "longrope": (*_FACTORS, _ORIGINAL_LEN),
    "proportional": (),
}
# Numbers that config.json and RopeConfig name alike.
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor")
# The same; zero means the default, as null does.
_YARN_NUMBERS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: the base `theta` and the scaling for long contexts.

    Fields that a type does not use keep their defaults.

    Attributes:
        rope_type: default, linear, llama3, yarn, longrope or proportional.
        theta: the base.
        rotary_dim: number of a head's first elements that are rotated; even.
        is_interleaved: whether the checkpoint pairs neighbouring elements, instead of those half of
            `rotary_dim` apart.
        original_len: the context length before scaling.
        max_len: the longest sequence that is served.
        short_factors: of LongRoPE, per pair of elements, if `max_len` is at most `original_len`.
        long_factors: the same if it is longer.
        num_turning: of `proportional`, the number of pairs that turn, the first ones.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    is_interleaved: bool = False
    factor: float = 1.0
    original_len: float = 0.0
    max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    num_turning: int = 0

    @property
    def is_long(self) -> bool:
        """Whether LongRoPE uses its factors for long sequences."""
        return self.rope_type == "longrope" and self.max_len > self.original_len

    @property
    def extended_len(self) -> int:
        """The context length that YaRN extends to; 0 for other types."""
        return int(self.original_len * self.factor) if self.rope_type == "yarn" else 0

    def temperature(self, mscale: float) -> float:
        """Returns YaRN's factor on queries and keys, which grows with `mscale`."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def read_rope(fields: ConfigFields, head_dim: int, *, is_interleaved: bool = False) -> RopeConfig:
    """Reads the one rotary embedding of a model.

    `rope_scaling` comes before `rope_parameters`, and config.json's own
    `original_max_position_embeddings` before that of the scaling.

    Args:
        fields: of config.json.
        head_dim: width of a head.
        is_interleaved: as in `RopeConfig`.

    Raises:
        ConfigFieldError: a parameter is missing, or has an unsupported value.
    """
    name = "rope_scaling" if fields.raw("rope_scaling") else "rope_parameters"
    parameters = dict(_object(name, fields.optional(name)))
    parameters.setdefault("rope_theta", fields.value("rope_theta"))
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise unsupported("rope_type", "per layer type")
    if fields.has(_ORIGINAL_LEN) or fields.states(_ORIGINAL_LEN):
        parameters[_ORIGINAL_LEN] = fields.optional(_ORIGINAL_LEN)
    return replace(_read_parameters(fields, parameters, head_dim), is_interleaved=is_interleaved)


def read_ropes_by_type(
    fields: ConfigFields,
    head_dims: Mapping[str, int],
    layer_types: Sequence[str],
    thetas: Mapping[str, float],
) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """Reads a rotary embedding per layer type; `rope_scaling` is that of "full_attention".

    Args:
        fields: of config.json.
        head_dims: by layer type, the width of a head.
        layer_types: of each layer.
        thetas: by layer type, the base where its parameters state none.

    Returns:
        The different embeddings, and each layer's index among them.

    Raises:
        ConfigFieldError: a parameter is missing, or has an unsupported value.
    """
    stated = _object("rope_parameters", fields.optional("rope_parameters"))
    scaling = _object("rope_scaling", fields.raw("rope_scaling"))
    if any(not isinstance(value, Mapping | None) for value in stated.values()):
        raise wrong("rope_parameters", dict(stated), "an object per layer type")
    by_type = {}
    for layer_type in dict.fromkeys(layer_types):
        parameters = dict(stated.get(layer_type) or {})
        parameters |= scaling if layer_type == "full_attention" else {}
        parameters.setdefault("rope_theta", thetas[layer_type])
        by_type[layer_type] = _read_parameters(fields, parameters, head_dims[layer_type])
    ropes = tuple(dict.fromkeys(by_type.values()))
    return ropes, tuple(ropes.index(by_type[layer_type]) for layer_type in layer_types)


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise wrong(name, value, "an object")
    return value or {}


def _read_parameters(fields: ConfigFields, parameters: dict[str, Any], head_dim: int) -> RopeConfig:
    """Reads one rotary embedding, and completes `parameters` as transformers does."""
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    parameters["rope_type"] = rope_type = "longrope" if rope_type == "su" else rope_type
    if not isinstance(rope_type, str) or rope_type not in _NEEDED_BY_TYPE:
        raise unsupported("rope_type", rope_type)
    max_len = fields.count("max_position_embeddings")
    if _ORIGINAL_LEN in _NEEDED_BY_TYPE[rope_type]:
        parameters.setdefault(_ORIGINAL_LEN, max_len)
    is_quotient = rope_type == "longrope" or (rope_type == "yarn" and "factor" in parameters)
    if is_quotient and parameters.get("factor") is None:
        parameters["factor"] = max_len / positive(_ORIGINAL_LEN, parameters[_ORIGINAL_LEN])
    for name in _NEEDED_BY_TYPE[rope_type]:
        if parameters.get(name) is None:
            raise ConfigFieldError(f"rope_type {rope_type!r} needs {name}")
    share = parameters.get("partial_rotary_factor")
    num_turning = 0
    if rope_type == "proportional":  # its pairs are half a head apart, and the last do not turn
        num_turning, share = _num_turning(share, head_dim), 1
    rope = RopeConfig(
        # The base of dynamic scaling changes only beyond `max_position_embeddings`.
        rope_type="default" if rope_type == "dynamic" else rope_type,
        theta=positive("rope_theta", parameters["rope_theta"]),
        rotary_dim=_rotary_dim(fields, share, head_dim),
        num_turning=num_turning,
        max_len=max_len,
        **_scaling(parameters),
    )
    _check(rope)
    return rope


def _num_turning(stated_share: Any, head_dim: int) -> int:
    name = "partial_rotary_factor"
    share = 1 if stated_share is None else positive(name, stated_share)
    if share > 1:
        raise unsupported(name, share)
    return int(share * head_dim // 2)


def _rotary_dim(fields: ConfigFields, stated_share: Any, head_dim: int) -> int:
    name = "partial_rotary_factor"
    stated_share = fields.optional(name) if stated_share is None else stated_share
    share = 1 if stated_share is None else positive(name, stated_share)
    if share > 1 or (share < 1 and not fields.has(name)):
        raise unsupported(name, share)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not rotary_dim:  # elements are rotated in pairs
        raise unsupported("head_dim", head_dim) if share == 1 else unsupported(name, share)
    return rotary_dim


def _scaling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `RopeConfig` that the parameters state."""
    names = {name: name for name in (*_NUMBERS, *_YARN_NUMBERS)}
    names[_ORIGINAL_LEN] = "original_len"
    stated: dict[str, Any] = {
        own_name: positive(name, parameters[name])
        for name, own_name in names.items()
        if parameters.get(name) is not None and (parameters[name] or name not in _YARN_NUMBERS)
    }
    if "truncate" in parameters:
        stated["truncate"] = bool(parameters["truncate"])
    if parameters["rope_type"] == "longrope":
        stated |= {f"{name}s": _factors(name, parameters[name]) for name in _FACTORS}
    return stated


def _factors(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise wrong(name, values, "a list of numbers")
    return tuple(positive(name, value) for value in values)


def _check(rope: RopeConfig) -> None:
    """Checks values that are supported only together."""
    if rope.rope_type == "yarn" and rope.theta == 1:  # all pairs of elements would turn alike
        raise unsupported("rope_theta", rope.theta)
    if rope.rope_type == "yarn" and rope.original_len * rope.factor > MAX_TOKENS:
        raise ConfigFieldError(
            f"factor {rope.factor} times {_ORIGINAL_LEN} {rope.original_len} is more than "
            f"{MAX_TOKENS} tokens"
        )
    if rope.rope_type != "longrope":
        return
    num_pairs = rope.rotary_dim // 2
    for name, factors in zip(_FACTORS, (rope.short_factors, rope.long_factors), strict=True):
        if len(factors) != num_pairs:
            raise ConfigFieldError(f"{name} has {len(factors)} numbers; it must have {num_pairs}")
    if rope.original_len <= 1:  # the amplitude is a quotient by its logarithm
        raise unsupported(_ORIGINAL_LEN, rope.original_len)
