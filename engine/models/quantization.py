"""`Scheme`: how a checkpoint's weights are quantized, by config.json's `quantization_config`. Pure.

Bits, groups and zero points of a layer follow from the shapes of its tensors
(`engine.runtime.weights.quantized`). Here are refused the values of fields whose weights would be
read wrongly, or not at all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from engine.models.config_fields import ConfigFieldError, wrong

__all__ = ["Scheme", "SchemeKind", "quantization_scheme"]

_FIELD = "quantization_config"
_BLOCK = [128, 128]  # rows and columns that share a scale of 8-bit floats
_INTEGER_BITS = (4, 8)

_Fields = Mapping[str, Any]


class SchemeKind(Enum):
    """The form of a quantized layer's tensors. The values are vLLM's names."""

    GPTQ = "gptq"
    """Integers in int32 words along the inputs (arXiv:2210.17323)."""
    AWQ = "awq"
    """4-bit integers in int32 words along the outputs (arXiv:2306.00978)."""
    COMPRESSED = "compressed-tensors"
    """Integers or 8-bit floats, as the library `compressed-tensors` stores them."""
    FP8 = "fp8"
    """8-bit floats with scales of a tensor, of its rows or of blocks of 128 x 128."""
    MXFP4 = "mxfp4"
    """Experts in 4-bit floats: see `engine.models.expert_storage`."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's weights are quantized.

    Attributes:
        kind: the form of its tensors.
        bits: of an integer, where a layer's tensors do not show it.
        group: number of columns that share a scale, where they do not show it; None for all.
        zero_offset: the number that stored zero points lack.
        is_symmetric: whether all zero points are the middle of the integers' range.
        has_column_order: whether the columns of a group of compressed-tensors may lie apart.
        unused: fields that have no effect.
    """

    kind: SchemeKind
    bits: int = 8
    group: int | None = None
    zero_offset: int = 0
    is_symmetric: bool = True
    has_column_order: bool = False
    unused: tuple[str, ...] = ()


def quantization_scheme(stated: object) -> Scheme | None:
    """Returns the scheme that a `quantization_config` states; None if there is none.

    Raises:
        ConfigFieldError: weights of that kind are not supported; names the field and its value.
    """
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise wrong(_FIELD, stated, "an object")
    method = stated.get("quant_method")
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise _refused("quant_method", method, f"it must be one of {', '.join(_METHODS)}")
    return read(stated)


def _gptq(fields: _Fields) -> Scheme:
    _check_value(fields, "bits", _INTEGER_BITS)
    stored_as = fields.get("checkpoint_format") or "gptq"
    if stored_as not in ("gptq", "gptq_v2"):
        raise _refused("checkpoint_format", stored_as, "it must be gptq or gptq_v2")
    _check_value(fields, "is_marlin_format", (None, False))
    _check_value(fields, "pack_dtype", (None, "int32"))
    for layers, changes in (_mapping(fields, "dynamic") or {}).items():
        if isinstance(changes, Mapping):
            path = f"dynamic {layers!r} "
            _check_value(changes, "bits", (None, *_INTEGER_BITS), path)
            _check_value(changes, "sym", (None, fields.get("sym")), path)
    _flag(fields, "desc_act", default=False)  # a layer's tensors tell the order of its columns
    return Scheme(
        SchemeKind.GPTQ,
        bits=fields["bits"],
        group=_group_size(fields),
        zero_offset=1 if stored_as == "gptq" else 0,
        is_symmetric=_flag(fields, "sym", default=True),
    )


def _auto_round(fields: _Fields) -> Scheme:
    """Reads a config of AutoRound, whose releases store zero points in more than one way."""
    _check_value(fields, "packing_format", ("auto_round:auto_gptq",))
    _check_value(fields, "data_type", (None, "int"))
    _check_value(fields, "sym", (None, True))
    return _gptq({**fields, "checkpoint_format": None})


def _awq(fields: _Fields) -> Scheme:
    bits = fields.get("bits", fields.get("w_bit"))
    _check_value({"bits": bits}, "bits", (4,))
    version = fields.get("version") or "gemm"
    if str(version).lower() != "gemm":
        raise _refused("version", version, "it must be gemm")
    _check_value(fields, "zero_point", (None, True))
    return Scheme(SchemeKind.AWQ, bits=bits, group=_group_size(fields), is_symmetric=False)


def _fp8(fields: _Fields) -> Scheme:
    _check_value(fields, "fmt", (None, "e4m3"))
    _check_value(fields, "weight_block_size", (None, _BLOCK))
    static = ("activation_scheme",) if fields.get("activation_scheme") == "static" else ()
    return Scheme(SchemeKind.FP8, unused=static)


def _fbgemm_fp8(_: _Fields) -> Scheme:
    return Scheme(SchemeKind.FP8)


def _mxfp4(_: _Fields) -> Scheme:
    return Scheme(SchemeKind.MXFP4, bits=4)


def _compressed(fields: _Fields) -> Scheme:
    sparsity = _mapping(fields, "sparsity_config") or {}
    _check_value(sparsity, "format", (None, "dense"), "sparsity_config.")
    if fields.get("transform_config"):
        raise _refused("transform_config", fields["transform_config"], "it must be empty")
    groups = _mapping(fields, "config_groups") or {}
    if not groups:
        raise _refused("config_groups", fields.get("config_groups"), "it must have a group")
    unused = ["kv_cache_scheme"] if fields.get("kv_cache_scheme") else []
    has_column_order = False
    for name in groups:
        group, path = _mapping(groups, name) or {}, f"config_groups.{name}."
        stored_as = group.get("format") or fields.get("format")
        weights = _mapping(group, "weights")
        if weights is None:
            continue
        _check_compressed(stored_as, weights, path)
        has_column_order |= weights.get("actorder") is not None
        inputs = _mapping(group, "input_activations")
        if inputs is not None and not inputs.get("dynamic"):
            unused.append(f"{path}input_activations")
    return Scheme(SchemeKind.COMPRESSED, has_column_order=has_column_order, unused=tuple(unused))


def _check_compressed(stored_as: object, weights: _Fields, path: str) -> None:
    """Checks how the library stored the weights of a group of layers."""
    kinds = {
        "pack-quantized": ("int",),
        "int-quantized": ("int",),
        "float-quantized": ("float",),
        "naive-quantized": ("int", "float"),
    }
    if not isinstance(stored_as, str) or stored_as not in kinds:
        raise _refused("format", stored_as, f"it must be one of {', '.join(kinds)}", path)
    _check_value(weights, "type", kinds[stored_as], f"{path}weights.")
    bits = weights.get("num_bits")
    allowed = _INTEGER_BITS if stored_as == "pack-quantized" else (8,)
    if not _is_one_of(bits, allowed):
        limit = f"it must be {' or '.join(map(str, allowed))} with {stored_as}"
        raise _refused("num_bits", bits, limit, f"{path}weights.")
    _check_value(
        weights, "strategy", (None, "tensor", "channel", "group", "block"), f"{path}weights."
    )
    if weights.get("strategy") == "block":
        _check_value(weights, "block_structure", (_BLOCK, "128x128"), f"{path}weights.")


def _group_size(fields: _Fields) -> int | None:
    """Returns the number of columns that share a scale; None, which is stored as -1, for all."""
    size = fields.get("group_size", fields.get("q_group_size"))
    if size in (None, -1):
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise wrong(f"{_FIELD}.group_size", size, "a positive integer, or -1")
    return size


def _check_value(fields: _Fields, name: str, accepted: tuple[object, ...], path: str = "") -> None:
    """Refuses other values of a field than those accepted; None is that of an absent field."""
    value = fields.get(name)
    if not _is_one_of(value, accepted):
        shown = " or ".join("absent" if value is None else str(value) for value in accepted)
        raise _refused(name, value, f"it must be {shown}", path)


def _is_one_of(value: object, accepted: tuple[object, ...]) -> bool:
    """Whether a value is among those accepted, and has its type: 4.0 and true are not integers."""
    return any(type(value) is type(other) and value == other for other in accepted)


def _flag(fields: _Fields, name: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise wrong(f"{_FIELD}.{name}", value, "true or false")
    return value


def _mapping(fields: _Fields, name: str) -> _Fields | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise wrong(f"{_FIELD}.{name}", value, "an object")
    return value


def _refused(name: str, value: object, limit: str, path: str = "") -> ConfigFieldError:
    return ConfigFieldError(f"{_FIELD}.{path}{name} {value!r} is not supported; {limit}")


_METHODS: Mapping[str, Callable[[_Fields], Scheme]] = MappingProxyType(
    {
        "awq": _awq,
        "auto-round": _auto_round,
        "compressed-tensors": _compressed,
        "fbgemm_fp8": _fbgemm_fp8,
        "fp8": _fp8,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
    }
)
"""By `quant_method`."""
