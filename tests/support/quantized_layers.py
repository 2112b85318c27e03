"""Quantized layers as the tools that make checkpoints store them, and checkpoints with them.

Layers of GPTQ and AWQ are packed as AutoGPTQ and AutoAWQ do, integer by integer; those of
compressed-tensors by the library.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import tiny_checkpoint

__all__ = ["KINDS", "Kind", "StoredLayer", "quantized_folders"]

_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word, from its lowest bits on
_MAX_FP8 = 448.0


@dataclass(frozen=True)
class StoredLayer:
    """A layer's tensors, by the last part of their names, and the weight that they stand for."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor


@dataclass(frozen=True)
class Kind:
    """A way to quantize layers.

    Attributes:
        config: `quantization_config`.
        quantize: makes a layer of a weight.
        format: the storage format in which a layer of 96 inputs is kept; None if it is not.
    """

    config: dict[str, Any]
    quantize: Callable[[torch.Tensor], StoredLayer]
    format: str | None


def _gptq(
    weight: torch.Tensor,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    zero_offset: int = 1,
    is_ordered: bool = True,
) -> StoredLayer:
    columns = weight.shape[1]
    groups = torch.arange(columns) // group
    if not is_ordered:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    codes, scales, zeros = _rounded(weight, groups, bits, symmetric=symmetric)
    order = range(32 // bits)
    tensors = {
        "qweight": _words(codes, bits, order).t().contiguous(),
        "qzeros": _words(zeros.t() - zero_offset, bits, order),
        "scales": scales.t().contiguous(),
        "g_idx": groups.int(),
    }
    return StoredLayer(tensors, _numbers(codes, scales, zeros, groups))


def _awq(weight: torch.Tensor, *, group: int) -> StoredLayer:
    groups = torch.arange(weight.shape[1]) // group
    codes, scales, zeros = _rounded(weight, groups, 4, symmetric=False)
    tensors = {
        "qweight": _words(codes.t(), 4, _AWQ_OUTPUTS),
        "qzeros": _words(zeros.t(), 4, _AWQ_OUTPUTS),
        "scales": scales.t().contiguous(),
    }
    return StoredLayer(tensors, _numbers(codes, scales, zeros, groups))


def _rounded(
    weight: torch.Tensor, groups: torch.Tensor, bits: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes `[rows, columns]`, and float16 scales and zero points `[rows, groups]`."""
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        values = weight[:, groups == group]
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        if symmetric:
            low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
        scales.append(((high - low) / (2**bits - 1)).clamp(min=1e-4).half())
        middle = torch.full_like(low, 2 ** (bits - 1))
        zeros.append(middle if symmetric else (-low / scales[-1]).round().clamp(1, 2**bits - 1))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1).int()
    codes = (weight / scale[:, groups]).round().int() + zero[:, groups]
    return codes.clamp(0, 2**bits - 1), scale, zero


def _numbers(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    return scales.float()[:, groups] * (codes - zeros[:, groups])


def _words(codes: torch.Tensor, bits: int, order: Sequence[int]) -> torch.Tensor:
    """Packs integers of consecutive columns; `order` has those of a word from its lowest bits."""
    per_word = len(order)
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    words = torch.zeros(len(codes), padded.shape[1] // per_word, dtype=torch.int64)
    for place, integer in enumerate(order):
        words |= padded[:, integer::per_word] << (bits * place)
    return (words - ((words >> 31) << 32)).int()


def _compressed(weight: torch.Tensor, *, form: str, dtype: torch.dtype, **args: Any) -> StoredLayer:
    """Compresses and decompresses a layer by the library, which computes in the scales' type."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    blocks = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": (128, 128)}
    rows, columns = blocks.get(args["strategy"], (1, args.get("group_size")))
    low, high = (
        _by_block(weight, rows, columns, function) for function in (torch.amin, torch.amax)
    )
    scale, zero = calculate_qparams(low, high, weights)
    layer = {"weight": weight.to(dtype), "weight_scale": scale.to(dtype)}
    if not weights.symmetric:
        layer["weight_zero_point"] = zero.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress(layer, scheme)
    return StoredLayer(tensors, compressor.decompress(tensors, scheme)["weight"])


def _by_block(
    weight: torch.Tensor, rows: int, columns: int, function: Callable[..., torch.Tensor]
) -> torch.Tensor:
    parts = [
        torch.stack([function(part) for part in row.split(columns, dim=1)])
        for row in weight.split(rows)
    ]
    return torch.stack(parts)


def _fp8(weight: torch.Tensor, *, rows: int | None, columns: int | None, name: str) -> StoredLayer:
    """Rounds blocks of `rows` x `columns`; None stands for all of them."""
    block = rows or weight.shape[0], columns or weight.shape[1]
    scales = _by_block(weight.abs(), *block, torch.amax) / _MAX_FP8
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    stored = scales.reshape(()) if rows is columns is None else scales
    return StoredLayer({"weight": codes, name: stored}, codes.float() * wide)


def _compressed_kind(
    form: str, kept_in: str | None, dtype: torch.dtype = torch.float32, **weights: Any
) -> Kind:
    args = {"type": "int", "num_bits": 8, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": args, "format": form}
    if form != "pack-quantized":
        kind = {"type": args["type"], "num_bits": 8, "dynamic": True, "strategy": "token"}
        group["input_activations"] = kind
    config = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
    return Kind(config, partial(_compressed, form=form, dtype=dtype, **args), kept_in)


def _gptq_kind(kept_in: str | None, **settings: Any) -> Kind:
    config = {
        "quant_method": "gptq",
        "bits": settings.get("bits", 4),
        "group_size": settings.get("group", 32),
        "sym": settings.get("symmetric", True),
        "desc_act": not settings.get("is_ordered", True),
        "checkpoint_format": "gptq" if settings.get("zero_offset", 1) else "gptq_v2",
    }
    return Kind(config, partial(_gptq, **settings), kept_in)


_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
_BF16 = torch.bfloat16

KINDS: Mapping[str, Kind] = {
    "gptq": _gptq_kind("INT4_32"),
    "gptq 8 bits, v2": _gptq_kind("INT8_32", bits=8, group=64, zero_offset=0),
    "gptq with zero points": _gptq_kind("INT4_32", symmetric=False),
    "gptq v2 with zero points": _gptq_kind("INT4_32", symmetric=False, zero_offset=0),
    "gptq 8 bits with zero points": _gptq_kind(None, bits=8, symmetric=False),
    "gptq in another order": _gptq_kind(None, is_ordered=False, symmetric=False),
    "awq": Kind(_AWQ | {"group_size": 32}, partial(_awq, group=32), "INT4_32"),
    "w4a16 groups": _compressed_kind(
        "pack-quantized", "INT4_32", num_bits=4, strategy="group", group_size=32
    ),
    "w4a16 groups in bfloat16, with zero points": _compressed_kind(
        *("pack-quantized", "INT4_32", _BF16),
        num_bits=4,
        strategy="group",
        group_size=32,
        symmetric=False,
    ),
    "w4a16 channels": _compressed_kind("pack-quantized", "INT4_32", num_bits=4, strategy="channel"),
    "w8a16 channels": _compressed_kind("pack-quantized", "INT8", strategy="channel"),
    "w8a16 groups with zero points": _compressed_kind(
        "pack-quantized", None, strategy="group", group_size=32, symmetric=False
    ),
    "w8a8 channels": _compressed_kind("int-quantized", "INT8", strategy="channel"),
    "w8a8 tensors": _compressed_kind("int-quantized", "INT8", strategy="tensor"),
    "w8a8 floats": _compressed_kind(
        "float-quantized", "FP8", _BF16, type="float", strategy="channel"
    ),
    "fp8 tensors": Kind(
        {"quant_method": "fp8", "activation_scheme": "static"},
        partial(_fp8, rows=None, columns=None, name="weight_scale"),
        "FP8",
    ),
    "fp8 blocks": Kind(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        partial(_fp8, rows=128, columns=128, name="weight_scale_inv"),
        "FP8",
    ),
    "fbgemm": Kind(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        partial(_fp8, rows=1, columns=None, name="weight_scale"),
        "FP8",
    ),
}
"""Ways to quantize layers, by a name for tests."""


def quantized_folders(variant: str, kind: Kind, parent: Path, **fields: Any) -> tuple[Path, Path]:
    """Writes a variant's checkpoint with quantized projections, and with the weights they are.

    Args:
        variant: of `tests.support.checkpoints`.
        kind: the way to quantize.
        parent: gets both folders.
        **fields: of config.json of the quantized checkpoint.

    Returns:
        The folder of the quantized checkpoint, and that with the same weights in float32.
    """
    tensors = load_file(tiny_checkpoint(variant) / "model.safetensors")
    stored, dense = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            layer = kind.quantize(tensor)
            del stored[name]
            path = name.rpartition(".")[0]
            stored |= {f"{path}.{part}": content for part, content in layer.tensors.items()}
            dense[name] = layer.weight.float()
    folders = []
    for form, content in (("quantized", stored), ("dense", dense)):
        folder = parent / form
        shutil.copytree(tiny_checkpoint(variant), folder)
        _save(content, folder / "model.safetensors")
        folders.append(folder)
    config = json.loads((folders[0] / "config.json").read_text())
    config |= {"quantization_config": kind.config, **fields}
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders[0], folders[1]


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, file, metadata={"format": "pt"})
