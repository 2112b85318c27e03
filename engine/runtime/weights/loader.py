"""Loads a checkpoint: builds the model and copies the weights straight into place.

    lay out on the meta device -> check every name and shape -> allocate -> copy

Nothing is allocated until the files' headers agree with the model. Each
parameter is allocated once, in its final form and memory order; each checkpoint
tensor is read piece by piece into its part, or to a GPU through two small
buffers (`weight_upload`). There is never a second copy of the model. Quantized
weights keep their format if kernels serve it (`format_plan`).

`--load-format dummy` draws random weights on the device instead, and needs no file but
config.json. It is for measuring speed, which does not depend on the weights' values.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from tqdm import tqdm

import kernels
from baton.common.errors import ConfigurationError
from baton.common.model_files.gguf import GgufFile
from engine.kv_cache.spec import LayerGroups, group_layers
from engine.models.config import ModelConfig
from engine.models.layers import CausalModel
from engine.models.linear import PackedModule
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.models.quantization import Scheme, SchemeKind
from engine.models.tensor_parts import StoredModule, TensorPart, WeightTarget, fill
from engine.runtime.forward.memory_plan import check_weights
from engine.runtime.weights.checkpoint import Checkpoint, open_checkpoint
from engine.runtime.weights.described_model import DescribedModel, read_eos_token_ids
from engine.runtime.weights.dummy_weights import draw_weights, dummy_fingerprint
from engine.runtime.weights.format_plan import FormatOf, divides_blocks, plan_formats
from engine.runtime.weights.quantized.online import (
    check_quantization,
    online_formats,
    read_part,
)
from engine.runtime.weights.safetensors_file import StoredTensor, locate_tensors
from engine.runtime.weights.shared_weights import share_weights
from engine.runtime.weights.stored_tensors import (
    OpenFile,
    StoredTensors,
    open_safetensors,
    read_headers,
)
from engine.runtime.weights.weight_upload import upload
from kernels import ServedFormats
from kernels.block_rows import BlockRows
from kernels.formats import WeightFormat

__all__ = [
    "LoadedModel",
    "allocate_modules",
    "layer_groups_of",
    "load_model",
]

_logger = logging.getLogger("baton.engine")
_MEBIBYTE = 2**20
_UPLOADED_TO = ("cuda",)
"""Types of device to which weights are copied through buffers (`weight_upload`)."""
_FAST_PRODUCTS = "fast 2"  # other KV than "fast", which rounded all inputs by 32
_PIECE_ELEMENTS = 2**19  # two mebibytes of float32

# A tensor in a file: (file, its name in the file, the model's name for it).
_Match = tuple[Path, str, str]
_Parts = dict[str, list[TensorPart]]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model and its properties.

    Attributes:
        model: the model, with weights and without gradients.
        max_model_len: maximum number of prompt and generated tokens together.
        vocab_size: number of token ids; they start at 0.
        eos_token_ids: ids that end a generation.
        fingerprint: digest of config and weights.
        sliding_windows: per layer, the number of tokens a query sees, itself
            included; None for all.
        num_kv_heads: number of heads of the KV cache.
        head_dim: width of a head of the KV cache.
        dtype: type of weights and activations: "float32", "bfloat16" or "float16".
        tokenizer_digest: of the tokenizer's vocabulary; empty if it cannot be compared.
        weight_bytes: size of the weights of the part that was loaded.
        shares_weights: whether other processes may have the same memory for them.
        num_kv_parts: 2 if the KV cache has K and V, 1 if it has latent vectors.
    """

    model: CausalModel
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: bytes
    sliding_windows: tuple[int | None, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str
    tokenizer_digest: str = ""
    weight_bytes: int = 0
    shares_weights: bool = False
    num_kv_parts: int = 2


def load_model(
    path_or_name: str,
    dtype: str,
    device: torch.device | str,
    *,
    progress: bool,
    load_format: str = "auto",
    weights_folder: str | None = None,
    part: ModelPart = WHOLE_MODEL,
    max_model_len: int | None = None,
    quantization: str = "none",
    quantized_compute: str = "exact",
) -> LoadedModel:
    """Loads a model for inference.

    Args:
        path_or_name: a checkpoint folder, a GGUF file, a named model or a Hugging Face Hub name.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        device: the device for the weights.
        progress: whether to show a progress bar on stderr.
        load_format: "auto", or "dummy" for random weights in the shape of config.json.
        weights_folder: through which processes share weights on a CPU (`shared_weights`); None
            keeps them in memory of this process.
        part: the part of the model that this process computes.
        max_model_len: the longest sequence that is served; None for the model's limit. Rotary
            embeddings that are scaled by LongRoPE depend on it.
        quantization: the format to which weights are rounded, or how the checkpoint has to be
            quantized: `EngineConfig.quantization`.
        quantized_compute: how quantized weights are computed where kernels can: "exact", as the
            dense weights of their numbers; "fast", with inputs rounded to eight bits; "auto",
            fast in bfloat16.

    Raises:
        ConfigurationError: the checkpoint is missing, broken or unsupported,
            or the device does not have enough memory; one line that names the
            file, field, tensor or size.
    """
    device, is_dummy = torch.device(device), load_format == "dummy"
    checkpoint = open_checkpoint(path_or_name, with_weights=not is_dummy)
    described = DescribedModel.of(checkpoint, max_model_len)
    dtype_name = described.resolve_dtype(dtype)
    weights_dtype = getattr(torch, dtype_name)
    scheme = described.config.quantization
    _check_kind(checkpoint, scheme, path_or_name, quantization, is_dummy=is_dummy)
    open_file = _opener(checkpoint, scheme, weights_dtype)
    entries = list(read_headers(checkpoint.weight_files, open_file))
    described = described.stored_as({entry.name for entry in entries})
    whole, stored = described.build(), None
    if not is_dummy:
        stored = StoredTensors(entries, open_file, whole, weights_dtype)
        tensors = whole.embedding_tensor, whole.head_tensor
        if whole.config.tie_word_embeddings and not stored.tie_head(*tensors):
            described = described.untied()
            whole = described.build()
    model = whole if part == WHOLE_MODEL else described.build(part)
    layer_groups = layer_groups_of(model.config)
    layer_groups.slots_of(part.stage, part.num_stages)  # refuses stages of unequal parts
    shapes = {name: parts[0].tensor_shape for name, parts in whole.checkpoint_tensors().items()}
    names = [] if stored is None else _match_tensors(model, stored, checkpoint)
    shares_weights = weights_folder is not None and device.type == "cpu"
    rounding = online_formats(whole, quantization)
    served = kernels.served_formats(device, weights_dtype)
    formats = {*rounding.values(), *(stored.formats if stored is not None else ())}
    fast_modes = ("fast", "auto") if dtype_name == "bfloat16" else ("fast",)
    is_fast = quantized_compute in fast_modes and not served.fast.isdisjoint(formats)

    def format_of(name: str) -> WeightFormat | None:
        of_file = None if stored is None else stored.format_of(name)
        return rounding.get(name, of_file)

    plan_formats(model, format_of, served, is_fast=is_fast).log(weights_dtype.itemsize)
    weight_bytes = _allocate(model, weights_dtype, device, path_or_name)
    if device.type == "cpu":  # memory that is not yet written is not yet taken
        check_weights(path_or_name, weight_bytes, is_shared=shares_weights)
    fingerprint = dummy_fingerprint(checkpoint, device) if is_dummy else checkpoint.fingerprint()
    computed = _fast_variant(model, described, format_of, served) if is_fast else ""
    rounded = quantization if rounding else ""
    if variant := f"{model.config.kv_variant}{computed}{rounded}":
        fingerprint = bytes(xxhash.xxh3_128_digest(fingerprint + variant.encode()))

    def fill_weights() -> None:
        parts = model.checkpoint_tensors()
        if is_dummy:
            draw_weights(parts, shapes, weights_dtype, device, rounding)
        else:
            _copy_weights(parts, names, open_file, device, rounding, progress=progress)

    if weights_folder is not None and shares_weights:
        key = fingerprint + _part_text(part)
        shares_weights = share_weights(model, Path(weights_folder), key, fill_weights)
    else:
        fill_weights()
    return LoadedModel(
        model=model.eval(),
        max_model_len=model.config.max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=read_eos_token_ids(checkpoint, model.config.vocab_size),
        fingerprint=fingerprint,
        sliding_windows=model.config.sliding_windows,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=dtype_name,
        tokenizer_digest=checkpoint.files.tokenizer_digest(),
        weight_bytes=weight_bytes,
        shares_weights=shares_weights,
        num_kv_parts=model.config.num_kv_parts,
    )


def layer_groups_of(config: ModelConfig) -> LayerGroups:
    """Returns how a model's layers share blocks."""
    return group_layers(
        config.sliding_windows, config.recurrent_layers, config.kv_shapes, config.kv_sources
    )


def _part_text(part: ModelPart) -> bytes:
    if part == WHOLE_MODEL:
        return b""
    ranks = "" if part.ranks is None else f"{part.ranks.rank}/{part.ranks.size}"
    return f"{ranks} {part.stage}/{part.num_stages}".encode()


def _match_tensors(
    model: CausalModel, stored: StoredTensors, checkpoint: Checkpoint
) -> list[_Match]:
    """Matches the files' tensors with the model's part, and checks that none is missing."""
    matches = []
    for name, parts in model.checkpoint_tensors().items():
        place = stored.locate(name, parts[0])
        if place is None:
            raise ConfigurationError(f"{checkpoint.files.path} lacks tensor {name}")
        matches.append((*place, name))
    return matches


def _allocate(model: CausalModel, dtype: torch.dtype, device: torch.device, name: str) -> int:
    """Allocates memory for the weights of the model, and returns their bytes.

    Raises:
        ConfigurationError: the device does not have that much memory; names the model `name`.
    """
    packed = [module for module in model.modules() if isinstance(module, PackedModule)]
    num_planned = sum(module.planned_bytes(dtype) for module in packed)
    num_planned += sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    try:
        allocate_modules(model, dtype, device)
    except (RuntimeError, MemoryError, OSError) as error:  # torch.OutOfMemoryError: a RuntimeError
        raise ConfigurationError(
            f"cannot allocate {num_planned // _MEBIBYTE} MiB on {device} for the "
            f"weights of {name}; load a smaller --model, or a smaller --dtype"
        ) from error
    num_bytes = sum(module.weight.nbytes for module in packed)
    return num_bytes + sum(parameter.nbytes for parameter in model.parameters())


def allocate_modules(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Allocates each parameter of a model, uninitialized, and moves its buffers."""
    for module in model.modules():
        if isinstance(module, PackedModule):
            module.allocate(dtype, device)
        other_dtype = module.parameter_dtype if isinstance(module, StoredModule) else None
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=other_dtype or dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _all_parts(parts: _Parts) -> Iterator[TensorPart]:
    return chain.from_iterable(parts.values())


def _copy_weights(
    parts: _Parts,
    matches: list[_Match],
    open_file: OpenFile,
    device: torch.device,
    rounding: Mapping[str, WeightFormat],
    *,
    progress: bool,
) -> None:
    num_bytes = sum(part.target.nbytes for part in _all_parts(parts))
    with tqdm(
        total=num_bytes, unit="B", unit_scale=True, desc="Loading weights", disable=not progress
    ) as bar:
        if (
            device.type in _UPLOADED_TO
            and open_file is open_safetensors
            and not rounding
            and all(part.is_of_whole_rows for part in _all_parts(parts))
        ):
            upload(_stored(parts, matches), device, lambda target: bar.update(target.nbytes))
            return
        for target, tensor in _read_parts(parts, matches, open_file, rounding):
            fill(target, tensor)
            bar.update(target.nbytes)


def _stored(parts: _Parts, matches: list[_Match]) -> list[tuple[StoredTensor, WeightTarget]]:
    """Returns each tensor's place in the files and its target, in the order of the files."""
    places = {file: locate_tensors(file) for file in dict.fromkeys(match[0] for match in matches)}
    stored = [
        (places[file][name].rows(part.cuts[0]), part.target)
        for file, name, expected in matches
        for part in parts[expected]
    ]
    return sorted(stored, key=lambda pair: (str(pair[0].file), pair[0].offset))


def _read_parts(
    parts: _Parts,
    matches: list[_Match],
    open_file: OpenFile,
    rounding: Mapping[str, WeightFormat],
) -> Iterator[tuple[WeightTarget, torch.Tensor | BlockRows]]:
    """Yields (target, its rows), file by file and piece by piece; only the parts are read."""
    for file in dict.fromkeys(match[0] for match in matches):
        with open_file(file) as tensors:
            for other_file, name, expected in matches:
                if other_file == file:
                    for part in parts[expected]:
                        yield from _read_part(tensors, name, part, rounding.get(expected))


def _read_part(
    tensors: Any, name: str, part: TensorPart, rounded_to: WeightFormat | None
) -> Iterator[tuple[WeightTarget, torch.Tensor | BlockRows]]:
    if not part.cuts:
        yield part.target, tensors.get_tensor(name)
        return
    stored = tensors.get_slice(name)
    for piece in part.pieces(_PIECE_ELEMENTS):
        yield piece.target, read_part(stored.__getitem__, piece, rounded_to)


def _check_kind(
    checkpoint: Checkpoint, scheme: Scheme | None, name: str, quantization: str, *, is_dummy: bool
) -> None:
    """Checks that a checkpoint is quantized as `--quantization` says, or can be."""
    kind, is_quantized = "" if scheme is None else scheme.kind.value, scheme is not None
    if isinstance(checkpoint.files, GgufFile):
        from engine.runtime.weights.gguf_weights import count_quantized

        kind, is_quantized = "gguf", bool(count_quantized(checkpoint.files.header))
    check_quantization(quantization, kind, name, is_quantized=is_quantized)
    if is_dummy and is_quantized:
        _logger.warning(
            "--load-format dummy: random weights are dense; those of %s are stored as %s",
            *(name, kind),
        )


def _fast_variant(
    model: CausalModel, described: DescribedModel, format_of: FormatOf, served: ServedFormats
) -> str:
    """Returns a text for the fingerprint that says how a rank computes fast products."""
    ranks = model.part.ranks
    if ranks is None:
        return _FAST_PRODUCTS
    layers = model if model.part.num_stages == 1 else described.build(ModelPart(ranks))
    is_divided = divides_blocks(layers, format_of, served.fast)
    return f"{_FAST_PRODUCTS} on {ranks.size} ranks" if is_divided else _FAST_PRODUCTS


def _opener(checkpoint: Checkpoint, scheme: Scheme | None, dtype: torch.dtype) -> OpenFile:
    """Returns the function that opens the checkpoint's weight files, by their format."""
    if not isinstance(checkpoint.files, GgufFile):
        if scheme is None or scheme.kind is SchemeKind.MXFP4:
            return open_safetensors
        from engine.runtime.weights.quantized.files import QuantizedFiles

        return QuantizedFiles(checkpoint.weight_files, scheme).open
    from engine.runtime.weights.gguf_weights import GgufWeights, log_dequantized

    header = checkpoint.files.header
    if checkpoint.weight_files:
        log_dequantized(header)
    return lambda file: GgufWeights(header, file, dtype)
