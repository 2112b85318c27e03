"""The rotary embedding of the model in a GGUF file, as `rope_parameters` of config.json."""

import math
import struct
from collections.abc import Set
from typing import Any

from baton.common.model_files.gguf.header import GgufHeader
from baton.common.model_files.gguf.values import HeaderValues

__all__ = ["FACTOR_TENSORS", "long_rope_parameters", "rope_parameters"]

# The tensor with the divisor of each frequency. Files of Llama 3.1 and later have it.
_LLAMA3_FACTORS = "rope_freqs.weight"
# The same of Phi-3 and Phi-4, for contexts of up to the original length and for longer ones.
_LONG_ROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
FACTOR_TENSORS = frozenset({_LLAMA3_FACTORS, *_LONG_ROPE_FACTORS.values()})
"""Tensors that are parts of the config, not weights."""

_DEFAULT_THETA = 10000.0
_KINDS = ("none", "linear", "yarn")
# From the keys of yarn's scaling to config.json's names.
_YARN_NAMES = {
    "scaling.factor": "factor",
    "scaling.original_context_length": "original_max_position_embeddings",
    "scaling.yarn_beta_fast": "beta_fast",
    "scaling.yarn_beta_slow": "beta_slow",
}
_NUMBERS = frozenset(_YARN_NAMES)
_SCALING_KEYS = frozenset({"scaling.type", "scaling.finetuned", *_YARN_NAMES})
# Values with which other keys change nothing; 0 is one of all of them.
_NEUTRAL = {
    "scale_linear": (1,),
    "scaling.attn_factor": (1,),
    "scaling.yarn_attn_factor": (1,),
}
# By kind; -1 stands for the kind's own value.
_NEUTRAL_EXT_FACTORS = {"none": (-1, 1), "linear": (-1,), "yarn": (-1, 1)}
# Llama 3's scaling in all published models; only its factor differs.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_RELATIVE_TOLERANCE = 1e-4  # the file has float32


def rope_parameters(
    values: HeaderValues, rotary_dim: int, *, also_known: Set[str] = frozenset()
) -> dict[str, Any]:
    """Returns the base and the scaling of the rotary embedding.

    Args:
        values: keys of the architecture.
        rotary_dim: number of a head's elements that are rotated.
        also_known: keys that the caller reads.

    Raises:
        ConfigurationError: the file has a kind of scaling that is not supported; names the key
            or the tensor.
    """
    header, prefix = values.header, values.name("rope.")
    stated = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix) and key not in map(values.name, also_known)
    }
    for key, value in stated.items():
        if key == "freq_base" or (key in _NUMBERS and value):  # 0 is no statement of the others
            _check_number(header, prefix + key, value)
    theta = float(stated.get("freq_base", _DEFAULT_THETA))
    kind = _scaling_kind(header, prefix, stated)
    if _LLAMA3_FACTORS in header.tensors:
        return {"rope_theta": theta, **_llama3_parameters(header, kind, theta, rotary_dim)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    return {"rope_theta": theta, "rope_type": kind, **_scaling(header, prefix, kind, stated)}


def _scaling_kind(header: GgufHeader, prefix: str, stated: dict[str, Any]) -> str:
    """Returns the kind of scaling; "none" too for one that changes nothing.

    A file without the type scales linearly, by 1 if it has no factor. With the type "none" its
    factor does not count. Both are llama.cpp's rules.
    """
    kind = stated.get("scaling.type", "linear")
    if kind not in _KINDS:
        raise header.refuse(f"{prefix}scaling.type {kind!r} is not supported")
    neutral = {**_NEUTRAL, "scaling.yarn_ext_factor": _NEUTRAL_EXT_FACTORS[kind]}
    for key, value in sorted(stated.items()):
        is_known = key in _SCALING_KEYS or not key.startswith("scal")
        if not is_known and value and value not in neutral.get(key, ()):
            raise header.refuse(f"{prefix}{key} {value!r} is not supported")
    has_factor = "scaling.type" in stated or stated.get("scaling.factor")
    is_neutral = stated.get("scaling.factor") == 1 or not has_factor
    return "none" if is_neutral else kind


def _check_number(header: GgufHeader, key: str, value: Any) -> None:
    """Refuses what is not a positive, finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise header.refuse(f"{key} {value!r} is not supported")


def _scaling(header: GgufHeader, prefix: str, kind: str, stated: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a linear or yarn scaling."""
    if not stated.get("scaling.factor"):
        raise header.refuse(f"it has no {prefix}scaling.factor, which the scaling {kind} needs")
    if kind == "linear":
        return {"factor": stated["scaling.factor"]}
    if not stated.get("scaling.original_context_length"):
        raise header.refuse(
            f"it has no {prefix}scaling.original_context_length, which the scaling {kind} needs"
        )
    return {name: stated[key] for key, name in _YARN_NAMES.items() if stated.get(key)}


def long_rope_parameters(values: HeaderValues, rotary_dim: int) -> dict[str, Any] | None:
    """Returns the base and the factors of Phi-3's scaling; None for files without its tensors.

    Args:
        values: keys of the architecture.
        rotary_dim: number of a head's elements that are rotated.

    Raises:
        ConfigurationError: one of the tensors is missing or malformed, or the file states another
            factor for attention than `transformers` computes.
    """
    header = values.header
    if not header.tensors.keys() & _LONG_ROPE_FACTORS.values():
        return None
    if header.metadata.get(values.name("rope.scaling.type"), "longrope") != "longrope":
        raise values.unsupported("rope.scaling.type")
    original = values.integer("rope.scaling.original_context_length")
    scale = max(1.0, values.integer("context_length") / original)
    implied = math.sqrt(1 + math.log(scale) / math.log(original))
    stated = values.number("rope.scaling.attn_factor", implied)
    if not math.isclose(stated, implied, rel_tol=_RELATIVE_TOLERANCE):
        raise values.unsupported("rope.scaling.attn_factor")
    return {
        "rope_type": "longrope",
        "rope_theta": values.number("rope.freq_base", _DEFAULT_THETA),
        "original_max_position_embeddings": original,
        **{
            name: _read_factors(header, tensor, rotary_dim // 2)
            for name, tensor in _LONG_ROPE_FACTORS.items()
        },
    }


def _llama3_parameters(
    header: GgufHeader, kind: str, theta: float, rotary_dim: int
) -> dict[str, Any]:
    """Returns the parameters of Llama 3's scaling that the frequencies' divisors follow from.

    Raises:
        ConfigurationError: the divisors are others.
    """
    if kind != "none":
        raise header.refuse(f"tensor {_LLAMA3_FACTORS} is not supported")
    count = rotary_dim // 2
    factors = _read_factors(header, _LLAMA3_FACTORS, count)
    factor = float(max(factors))
    expected = [_llama3_divisor(theta ** (-2 * i / rotary_dim), factor) for i in range(count)]
    if factor < 1 or not all(
        math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE)
        for a, b in zip(factors, expected, strict=True)
    ):
        raise header.refuse(
            f"tensor {_LLAMA3_FACTORS} has other values than Llama 3's scaling, "
            "and is not supported"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_divisor(frequency: float, factor: float) -> float:
    """Returns the divisor of a frequency: 1 for high ones, `factor` for low ones."""
    rotations = _LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    if rotations > high:
        return 1.0
    if rotations < low:
        return factor
    smooth = (rotations - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _read_factors(header: GgufHeader, name: str, count: int) -> list[float]:
    """Returns the `count` numbers of a tensor in float32.

    Raises:
        ConfigurationError: the file has no such tensor.
    """
    tensor = header.tensors.get(name)
    if tensor is None:
        raise header.refuse(f"it has no tensor {name}")
    if tensor.type_id != 0 or tensor.shape != (count,):
        raise header.refuse(f"tensor {name} is not supported")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(4 * count)
    if len(data) < 4 * count:
        raise header.refuse(f"it ends within tensor {name}")
    return list(struct.unpack(f"<{count}f", data))
