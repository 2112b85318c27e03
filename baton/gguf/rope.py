"""The rotary embedding of the model in a GGUF file, as `rope_parameters` of config.json."""

import math
import struct
from typing import Any

from baton.gguf.header import GgufHeader

__all__ = ["FREQUENCY_FACTORS", "rope_parameters"]

FREQUENCY_FACTORS = "rope_freqs.weight"
"""The tensor with the divisor of each frequency. Files of Llama 3.1 and later have it."""

_DEFAULT_THETA = 10000.0
_KINDS = ("none", "linear", "yarn")
# Llama 3's scaling in all published models; only its factor differs.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_RELATIVE_TOLERANCE = 1e-4  # the file has float32


def rope_parameters(header: GgufHeader, architecture: str, head_dim: int) -> dict[str, Any]:
    """Returns the base and the scaling of the rotary embedding.

    Args:
        header: of the file.
        architecture: prefix of the keys.
        head_dim: width of a head.

    Raises:
        ConfigurationError: the file has a kind of scaling that is not supported; names the key
            or the tensor.
    """
    prefix = f"{architecture}.rope."
    stated = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    theta = float(stated.get("freq_base", _DEFAULT_THETA))
    kind = stated.get("scaling.type", "none")
    used = {"scaling.type", "scaling.finetuned"}
    if kind in ("linear", "yarn"):
        used |= {"scaling.factor", "scaling.original_context_length"}
    others = {key for key, value in stated.items() if key.startswith("scal") and value} - used
    if kind not in _KINDS or others:
        key = min(others) if kind in _KINDS else "scaling.type"
        raise header.refuse(f"{prefix}{key} {stated[key]!r} is not supported")
    if FREQUENCY_FACTORS in header.tensors:
        return {"rope_theta": theta, **_llama3_parameters(header, kind, theta, head_dim)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    return {"rope_theta": theta, "rope_type": kind, **_scaling(header, prefix, kind, stated)}


def _scaling(header: GgufHeader, prefix: str, kind: str, stated: dict[str, Any]) -> dict[str, Any]:
    names = {"scaling.factor": "factor"}
    if kind == "yarn":
        names["scaling.original_context_length"] = "original_max_position_embeddings"
    for key in names:
        if not stated.get(key):
            raise header.refuse(f"it has no {prefix}{key}, which the scaling {kind} needs")
    return {name: stated[key] for key, name in names.items()}


def _llama3_parameters(
    header: GgufHeader, kind: str, theta: float, head_dim: int
) -> dict[str, Any]:
    """Returns the parameters of Llama 3's scaling that the frequencies' divisors follow from.

    Raises:
        ConfigurationError: the divisors are others.
    """
    tensor = header.tensors[FREQUENCY_FACTORS]
    count = head_dim // 2
    if kind != "none" or tensor.type_id != 0 or tensor.shape != (count,):
        raise header.refuse(f"tensor {FREQUENCY_FACTORS} is not supported")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(4 * count)
    if len(data) < 4 * count:
        raise header.refuse(f"it ends within tensor {FREQUENCY_FACTORS}")
    found = struct.unpack(f"<{count}f", data)
    factor = float(max(found))
    expected = [_llama3_divisor(theta ** (-2 * i / head_dim), factor) for i in range(count)]
    if factor < 1 or not all(
        math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE)
        for a, b in zip(found, expected, strict=True)
    ):
        raise header.refuse(
            f"tensor {FREQUENCY_FACTORS} has other values than Llama 3's scaling, "
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
