"""Loads a checkpoint: builds the model and copies the weights straight into place.

    lay out on the meta device -> check every name and shape -> allocate -> copy

Nothing is allocated until the files' headers agree with the model. Each
parameter is allocated once, in its final type and memory order; each checkpoint
tensor is copied from the memory-mapped file into its part, or to a GPU through
two small buffers (`weight_upload`). There is never a second copy of the model.
Tensors of a GGUF file are dequantized one after another (`gguf_weights`).

`--load-format dummy` draws random weights on the device instead, and needs no file but
config.json. It is for measuring speed, which does not depend on the weights' values.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from baton.errors import ConfigurationError
from baton.gguf import GgufFile
from engine.config import DTYPES
from engine.models.config_fields import ConfigFields
from engine.models.layers import CausalModel
from engine.models.linear import PackedModule, TensorPart, WeightTarget
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.models.registry import family_of
from engine.runtime.checkpoint import Checkpoint, open_checkpoint
from engine.runtime.eos_tokens import read_eos_token_ids
from engine.runtime.shared_weights import share_weights
from engine.runtime.weight_upload import StoredTensor, locate_tensors, upload

__all__ = [
    "LoadedModel",
    "allocate_modules",
    "config_fields",
    "draw_weights",
    "dummy_fingerprint",
    "load_model",
    "resolve_dtype",
]

_MEBIBYTE = 2**20
_UPLOADED_TO = ("cuda",)
"""Types of device to which weights are copied through buffers (`weight_upload`)."""
_FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")  # safetensors' names
# Tensors in some checkpoints that no model needs: constants of the code that wrote them.
_IGNORED_TENSORS = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")
_DUMMY_SEED = 0
_DUMMY_STANDARD_DEVIATION = 0.02  # most checkpoints' `initializer_range`; keeps activations finite

# A tensor in a file: (file, its name in the file, the model's name for it).
_Match = tuple[Path, str, str]
_Parts = dict[str, list[TensorPart]]
# Opens a file of tensors; the result has the methods of `safe_open`'s.
_OpenFile = Callable[[Path], Any]


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
        head_dim: width of a head.
        dtype: type of weights and activations: "float32", "bfloat16" or "float16".
        tokenizer_digest: of the tokenizer's vocabulary; empty if it cannot be compared.
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


def load_model(
    path_or_name: str,
    dtype: str,
    device: torch.device | str,
    *,
    progress: bool,
    load_format: str = "auto",
    weights_folder: str | None = None,
    part: ModelPart = WHOLE_MODEL,
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

    Raises:
        ConfigurationError: the checkpoint is missing, broken or unsupported,
            or the device does not have enough memory; one line that names the
            file, field, tensor or size.
    """
    device, is_dummy = torch.device(device), load_format == "dummy"
    checkpoint = open_checkpoint(path_or_name, with_weights=not is_dummy)
    family = family_of(checkpoint.architecture)
    fields = config_fields(checkpoint, family.model_type)
    dtype_name = resolve_dtype(dtype, fields)
    with torch.device("meta"):
        config = family.read_config(fields)
        model = family.build(config, part)
        whole = model if part.num_stages == 1 else family.build(config)
    shapes = {name: parts[0].tensor_shape for name, parts in whole.checkpoint_tensors().items()}
    weights_dtype = getattr(torch, dtype_name)
    open_file = _opener(checkpoint, weights_dtype)
    names = [] if is_dummy else _match_tensors(model, shapes.keys(), checkpoint, open_file)
    _allocate(model, weights_dtype, device, path_or_name)
    fingerprint = dummy_fingerprint(checkpoint, device) if is_dummy else checkpoint.fingerprint()

    def fill() -> None:
        parts = model.checkpoint_tensors()
        if is_dummy:
            draw_weights(parts, shapes, weights_dtype, device)
        else:
            _copy_weights(parts, names, open_file, device, progress=progress)

    if weights_folder is None or device.type != "cpu":
        fill()
    else:
        share_weights(model, Path(weights_folder), fingerprint + _part_text(part), fill)
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
    )


def _part_text(part: ModelPart) -> bytes:
    if part == WHOLE_MODEL:
        return b""
    ranks = "" if part.ranks is None else f"{part.ranks.rank}/{part.ranks.size}"
    return f"{ranks} {part.stage}/{part.num_stages}".encode()


def config_fields(checkpoint: Checkpoint, model_type: str) -> ConfigFields:
    """Returns the fields of a checkpoint's config.json.

    Args:
        checkpoint: the checkpoint.
        model_type: the `model_type` that its architecture has.

    Raises:
        ConfigurationError: the config has another `model_type`.
    """
    given = checkpoint.config.get("model_type")
    if given != model_type:
        file = checkpoint.files.locate("config.json")
        raise ConfigurationError(
            f"{file}: model_type is {given!r}; {checkpoint.architecture} is {model_type!r}"
        )
    return ConfigFields(checkpoint.config, model_type)


def resolve_dtype(dtype: str, fields: ConfigFields) -> str:
    """Returns the name of the type that a model's weights are loaded in.

    Args:
        dtype: `EngineConfig.dtype`; "auto" is config.json's type, or float32 if it has none.
        fields: of config.json.

    Raises:
        ConfigurationError: weights cannot be loaded in that type.
    """
    name = fields.dtype if dtype == "auto" else dtype
    if name not in DTYPES[1:]:
        raise ConfigurationError(
            f"dtype {name} is not supported; --dtype takes {', '.join(DTYPES)}"
        )
    return name


def _match_tensors(
    model: CausalModel, names: Set[str], checkpoint: Checkpoint, open_file: _OpenFile
) -> list[_Match]:
    """Matches the files' tensors with the model's, and checks that they match one to one.

    Args:
        model: the model.
        names: the names of all tensors of the whole model, of which this process may have some.
        checkpoint: the files.
        open_file: opens one.
    """
    expected = model.checkpoint_tensors()
    matches: dict[str, _Match] = {}
    for file in checkpoint.weight_files:
        with open_file(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                target = _target_of(name, model, names)
                if target not in expected:
                    continue
                shape = expected[target][0].tensor_shape
                _check_tensor(file, name, tensors.get_slice(name), shape)
                matches[target] = (file, name, target)
    for name in expected:
        if name not in matches:
            raise ConfigurationError(f"{checkpoint.files.path} lacks tensor {name}")
    return list(matches.values())


def _target_of(name: str, model: CausalModel, expected: Set[str]) -> str | None:
    """Returns the model's name for a tensor in a file; None if the model does not need it.

    Names in checkpoints saved from the bare model lack the first part of the prefix.
    """
    first_part = model.checkpoint_prefix.partition(".")[0]
    for candidate in (name, f"{first_part}.{name}"):
        if candidate in expected:
            return candidate
    if _IGNORED_TENSORS.search(name) or (name == "lm_head.weight" and model.lm_head is None):
        return None
    raise ConfigurationError(f"the checkpoint has tensor {name}, which the model does not have")


def _check_tensor(file: Path, name: str, stored: Any, expected: tuple[int, ...]) -> None:
    if stored.get_dtype() not in _FLOAT_DTYPES:
        raise ConfigurationError(
            f"{file}: tensor {name} is {stored.get_dtype()}; quantized weights are not supported"
        )
    shape, expected_shape = list(stored.get_shape()), list(expected)
    if shape != expected_shape:
        raise ConfigurationError(
            f"{file}: tensor {name} has shape {shape}; config.json asks for {expected_shape}"
        )


def _allocate(model: CausalModel, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Allocates memory for the weights of the model.

    Raises:
        ConfigurationError: the device does not have that much memory; names the model `name`.
    """
    num_elements = model.num_weights()
    try:
        allocate_modules(model, dtype, device)
    except (RuntimeError, MemoryError, OSError) as error:  # torch.OutOfMemoryError: a RuntimeError
        raise ConfigurationError(
            f"cannot allocate {num_elements * dtype.itemsize // _MEBIBYTE} MiB on {device} for the "
            f"weights of {name}; load a smaller --model, or a smaller --dtype"
        ) from error


def allocate_modules(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Allocates each parameter of a model, uninitialized, and moves its buffers."""
    for module in model.modules():
        if isinstance(module, PackedModule):
            module.allocate(dtype, device)
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _all_parts(parts: _Parts) -> Iterator[TensorPart]:
    return chain.from_iterable(parts.values())


def _copy_weights(
    parts: _Parts,
    matches: list[_Match],
    open_file: _OpenFile,
    device: torch.device,
    *,
    progress: bool,
) -> None:
    num_bytes = sum(part.target.nbytes for part in _all_parts(parts))
    with tqdm(
        total=num_bytes, unit="B", unit_scale=True, desc="Loading weights", disable=not progress
    ) as bar:
        if (
            device.type in _UPLOADED_TO
            and open_file is _open_safetensors
            and all(part.is_whole for part in _all_parts(parts))
        ):
            upload(_stored(parts, matches), device, lambda target: bar.update(target.nbytes))
            return
        for target, tensor in _read_parts(parts, matches, open_file):
            target.copy_(tensor)
            bar.update(target.nbytes)


def _stored(parts: _Parts, matches: list[_Match]) -> list[tuple[StoredTensor, WeightTarget]]:
    """Returns each tensor's place in the files and its target, in the order of the files."""
    places = {file: locate_tensors(file) for file in dict.fromkeys(match[0] for match in matches)}
    found = [
        (places[file][name], part.target)
        for file, name, expected in matches
        for part in parts[expected]
    ]
    return sorted(found, key=lambda pair: (str(pair[0].file), pair[0].offset))


def _read_parts(
    parts: _Parts, matches: list[_Match], open_file: _OpenFile
) -> Iterator[tuple[WeightTarget, torch.Tensor]]:
    """Yields (target, its elements), file by file; safetensors files are memory-mapped, and only
    the parts are read.
    """
    for file in dict.fromkeys(match[0] for match in matches):
        with open_file(file) as tensors:
            for other_file, name, expected in matches:
                if other_file == file:
                    for part in parts[expected]:
                        yield part.target, _read_part(tensors, name, part)


def _read_part(tensors: Any, name: str, part: TensorPart) -> torch.Tensor:
    read: torch.Tensor
    read = tensors.get_tensor(name) if part.is_whole else tensors.get_slice(name)[part.index]
    return read


def _opener(checkpoint: Checkpoint, dtype: torch.dtype) -> _OpenFile:
    """Returns the function that opens the checkpoint's weight files, by their format."""
    if not isinstance(checkpoint.files, GgufFile):
        return _open_safetensors
    from engine.runtime.gguf_weights import GgufWeights

    header = checkpoint.files.header
    return lambda _: GgufWeights(header, dtype)


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"{file} is not a readable safetensors file: {error}") from error


def draw_weights(
    parts: Mapping[str, Sequence[TensorPart]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Fills a model's weights: norms with ones, everything else with small normal numbers.

    Processes that draw the same shapes on the same kind of device get the same numbers. Each
    tensor is drawn in temporary memory, so memory for the largest one must be free.

    Args:
        parts: by checkpoint name, the parts to fill. Ranks get parts of the same tensors.
        shapes: by name, of all tensors of the whole model.
        dtype: type of the weights.
        device: device of the weights.
    """
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for name, shape in shapes.items():
        if len(shape) == 1 and not name.endswith(".bias"):
            numbers = torch.ones(shape, dtype=dtype, device=device)
        else:
            numbers = torch.randn(shape, generator=generator, dtype=dtype, device=device)
            numbers.mul_(_DUMMY_STANDARD_DEVIATION)
        for part in parts.get(name, ()):
            part.target.copy_(numbers[part.index])


def dummy_fingerprint(checkpoint: Checkpoint, device: torch.device) -> bytes:
    """Returns a digest of config.json and the kind of device, which determine the dummy weights.

    Args:
        checkpoint: the checkpoint, opened without its weights.
        device: the device that draws the weights.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return bytes(xxhash.xxh3_128_digest(checkpoint.fingerprint() + f"dummy\0{kind}".encode()))
