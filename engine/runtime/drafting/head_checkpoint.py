"""Loads heads that draft tokens: small checkpoints that belong to a served model.

The layouts are those of published checkpoints: of EAGLE and Medusa's own repositories, and of
vLLM. Their weights are safetensors files, or torch's, of which only tensors are read.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import nn

from baton.common.errors import ConfigurationError
from engine.models.config_fields import ConfigFields
from engine.models.decoder_config import DecoderConfig, decoder_config
from engine.models.heads import Eagle3Head, EagleHead, MedusaConfig, MedusaHeads
from engine.models.layers import CausalModel, checkpoint_tensors
from engine.models.tensor_parts import TensorPart
from engine.runtime.weights.checkpoint import one_line, open_checkpoint
from engine.runtime.weights.loader import LoadedModel, allocate_modules
from engine.runtime.weights.stored_tensors import is_without_effect

__all__ = ["load_eagle", "load_eagle3", "load_medusa"]

_OTHER_WEIGHTS = ("medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
_MEDUSA_LAYER = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
_MEDUSA_OUTPUT = re.compile(r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight")
_MEDUSA_FIRST_LAYERS = re.compile(r"blocks\.0\.layers\.\d+\.weight")
_FIRST_LAYER = "layers.0."  # vLLM's name for what EAGLE-3 calls `midlayer.`
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Tensors that a head shares with the served model, or that follow from others.
_UNUSED = ("embed_tokens.weight", "t2d")


Head = TypeVar("Head", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class _HeadCheckpoint:
    """The checkpoint of a head.

    Attributes:
        name: the user's name for it, for error messages.
        config: content of config.json.
        tensors: the weights by name; what a loader has read in another way is removed.
    """

    name: str
    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, name: str) -> "_HeadCheckpoint":
        """Reads a checkpoint folder, or downloads it from the Hugging Face Hub.

        Raises:
            ConfigurationError: it is missing or broken.
        """
        checkpoint = open_checkpoint(name, other_weights=_OTHER_WEIGHTS)
        tensors: dict[str, torch.Tensor] = {}
        for file in checkpoint.weight_files:
            tensors |= _read_tensors(file)
        return cls(name, checkpoint.config, {_plain_name(key): tensors[key] for key in tensors})

    def build(self, make: Callable[[], Head], served: LoadedModel, device: torch.device) -> Head:
        """Makes a head, allocates its weights and fills them.

        Args:
            make: makes the head without memory for weights.
            served: the served model, which has weights of the same type.
            device: device of the weights.

        Raises:
            ConfigurationError: a tensor is missing, unknown, or has another shape, or the device
                does not have enough memory.
        """
        dtype = getattr(torch, served.dtype)
        try:
            with torch.device("meta"):
                head = make()
            self._check_tensors(checkpoint_tensors(head))
            allocate_modules(head, dtype, device)
        except (RuntimeError, MemoryError, OSError) as error:
            raise self.error(f"cannot be loaded: {one_line(error)}") from error
        for name, parts in checkpoint_tensors(head).items():
            for part in parts:
                part.target.copy_(self.tensors[name][part.index].to(dtype=dtype, device=device))
        return head.eval()

    def _check_tensors(self, expected: Mapping[str, Sequence[TensorPart]]) -> None:
        """Checks that the tensors are those of a head."""
        for name in sorted(self.tensors.keys() - expected.keys()):
            if name not in _UNUSED and not is_without_effect(name):
                raise self.error(f"has tensor {name}, which such a head does not have")
        for name, parts in expected.items():
            if name not in self.tensors:
                raise self.error(f"lacks tensor {name}")
            tensor = self.tensors[name]
            if tuple(tensor.shape) != parts[0].tensor_shape:
                shapes = f"{list(tensor.shape)} instead of {list(parts[0].tensor_shape)}"
                raise self.error(f"has tensor {name} of shape {shapes}")
            if not tensor.is_floating_point():
                raise self.error(f"has tensor {name} of {tensor.dtype}; weights are floating-point")

    def error(self, problem: str) -> ConfigurationError:
        """Returns an error that names the checkpoint."""
        return ConfigurationError(
            f"model of --speculative-config is {self.name!r}, which {problem}"
        )

    def matrix(self, name: str, kind: str) -> torch.Tensor:
        """Returns a tensor that all heads of a kind have.

        Raises:
            ConfigurationError: it is missing, or no matrix.
        """
        tensor = self.tensors.get(name)
        if tensor is None or tensor.dim() != 2:
            raise self.error(f"lacks a matrix {name}: it is no {kind}")
        return tensor

    def take_draft_vocabulary(
        self, name: str, num_outputs: int, served: LoadedModel, device: torch.device, *, adds: bool
    ) -> torch.Tensor | None:
        """Removes the tensor of the tokens that the head can draft, and returns their ids.

        Args:
            name: the tensor's name.
            num_outputs: number of outputs of the head.
            served: the served model.
            device: device of the result.
            adds: whether the tensor has distances from the head's ids to the served model's.

        Returns:
            `[num_outputs]` int64; None if the head can draft all tokens.

        Raises:
            ConfigurationError: there are not as many, or the served model lacks one of them.
        """
        ids = self.tensors.pop(name, None)
        expected = served.vocab_size if ids is None else ids.numel()
        if num_outputs != expected:
            raise self.error(f"has outputs for {num_outputs} tokens instead of {expected}")
        if ids is None:
            return None
        if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or not len(ids):
            raise self.error(f"has a tensor {name} that is no list of tokens")
        ids = ids.long() + torch.arange(len(ids)) * adds
        if not 0 <= int(ids.min()) <= int(ids.max()) < served.vocab_size:
            raise self.error(f"drafts tokens that the served model does not have: see {name}")
        return ids.to(device)


def load_medusa(
    name: str, served: LoadedModel, device: torch.device
) -> tuple[MedusaHeads, torch.Tensor | None]:
    """Loads Medusa heads.

    Args:
        name: a checkpoint folder, or a name on the Hugging Face Hub.
        served: the served model.
        device: device of the heads.

    Returns:
        The heads, and the ids of the tokens that they draft, `[n]` int64; None for all tokens.

    Raises:
        ConfigurationError: the checkpoint is missing or broken, or does not fit the served model.
    """
    checkpoint = _HeadCheckpoint.read(name)
    output = checkpoint.matrix("lm_heads.0.weight", "checkpoint of Medusa heads")
    num_tokens, hidden_size = output.shape
    draft_vocabulary = checkpoint.take_draft_vocabulary(
        "token_map", num_tokens, served, device, adds=False
    )
    _check_width(checkpoint, hidden_size, served)
    names = checkpoint.tensors.keys()
    config = MedusaConfig(
        hidden_size=hidden_size,
        num_heads=sum(name.startswith("lm_heads.") for name in names),
        num_layers=sum(_MEDUSA_FIRST_LAYERS.fullmatch(name) is not None for name in names),
        num_tokens=num_tokens,
        has_bias="blocks.0.layers.0.bias" in names,
    )
    return checkpoint.build(lambda: MedusaHeads(config), served, device), draft_vocabulary


def load_eagle(
    name: str, served: LoadedModel, window: int, device: torch.device
) -> tuple[EagleHead, tuple[int, ...]]:
    """Loads a head of EAGLE.

    Args:
        name: a checkpoint folder, or a name on the Hugging Face Hub.
        served: the served model.
        window: number of tokens that the head sees.
        device: device of the head.

    Returns:
        The head, and the states of the served model that it reads, as in `KeptStates.layers`.

    Raises:
        ConfigurationError: the checkpoint is missing or broken, or does not fit the served model.
    """
    checkpoint = _HeadCheckpoint.read(name)
    checkpoint.tensors.pop("lm_head.weight", None)  # the served model's
    config = _read_config(checkpoint, served, window)
    config = replace(config, tie_word_embeddings=True, vocab_size=served.vocab_size)
    has_bias = "fc.bias" in checkpoint.tensors
    head = checkpoint.build(
        lambda: EagleHead(config, has_bias=has_bias, served_logits=served.model.logits),
        served,
        device,
    )
    return head, (served.model.config.num_layers,)


def load_eagle3(
    name: str, served: LoadedModel, window: int, device: torch.device
) -> tuple[Eagle3Head, tuple[int, ...], torch.Tensor | None]:
    """Loads a head of EAGLE-3; the arguments and errors are those of `load_eagle`.

    Returns:
        The head, the states of the served model that it reads, and the ids of the tokens that it
        drafts, `[n]` int64; None for all tokens.
    """
    checkpoint = _HeadCheckpoint.read(name)
    for key in [key for key in checkpoint.tensors if key.startswith(_FIRST_LAYER)]:
        tensor = checkpoint.tensors.pop(key)
        checkpoint.tensors[f"midlayer.{key.removeprefix(_FIRST_LAYER)}"] = tensor
    num_tokens = len(checkpoint.matrix("lm_head.weight", "head of EAGLE-3"))
    draft_vocabulary = checkpoint.take_draft_vocabulary(
        "d2t", num_tokens, served, device, adds=True
    )
    config = _read_config(checkpoint, served, window)
    config = replace(config, tie_word_embeddings=False, vocab_size=num_tokens)
    norms_residual = checkpoint.config.get("norm_before_residual", False)
    if not isinstance(norms_residual, bool):
        raise checkpoint.error(f"has norm_before_residual {norms_residual!r}; it is true or false")
    head = checkpoint.build(
        lambda: Eagle3Head(config, norms_residual=norms_residual),
        served,
        device,
    )
    return head, _read_layers(checkpoint, served.model), draft_vocabulary


def _read_config(checkpoint: _HeadCheckpoint, served: LoadedModel, window: int) -> DecoderConfig:
    """Reads the shape of an EAGLE head."""
    has_bias = any(name.endswith("q_proj.bias") for name in checkpoint.tensors)
    fields = ConfigFields(checkpoint.config, "llama")
    try:
        num_layers = fields.count("num_hidden_layers")
        config = decoder_config(fields) if num_layers == 1 else None
    except ConfigurationError as error:
        raise checkpoint.error(f"is invalid: {error}") from error
    if config is None:
        raise checkpoint.error(f"has {num_layers} layers; heads have one")
    _check_width(checkpoint, config.hidden_size, served)
    embedding = served.model.word_embedding
    if embedding is None or embedding.weight.num_columns != config.hidden_size:
        raise checkpoint.error("needs embeddings as wide as the served model's states")
    return replace(config, sliding_windows=(window,), qkv_bias=config.qkv_bias or has_bias)


def _read_layers(checkpoint: _HeadCheckpoint, model: CausalModel) -> tuple[int, ...]:
    """Returns the layers whose inputs a head of EAGLE-3 reads, in their order."""
    num_layers, eagle_config = model.config.num_layers, checkpoint.config.get("eagle_config")
    stated = (
        eagle_config
        if isinstance(eagle_config, Mapping) and _LAYER_IDS in eagle_config
        else checkpoint.config
    )
    layers = stated.get(_LAYER_IDS, [2, num_layers // 2, num_layers - 3])
    is_valid = isinstance(layers, list) and all(
        type(layer) is int and 0 <= layer < num_layers for layer in layers
    )
    if not is_valid or len(layers) != 3 or len(set(layers)) != 3:
        raise checkpoint.error(
            f"reads the layers {layers}; they must be three of the served model's {num_layers}"
        )
    return tuple(sorted(layers))


def _check_width(checkpoint: _HeadCheckpoint, width: int, served: LoadedModel) -> None:
    hidden_size = served.model.config.hidden_size
    if width != hidden_size:
        raise checkpoint.error(
            f"reads states of width {width}; the served model's are {hidden_size}"
        )


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            tensors: Any = load_file(file)
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # both have many kinds of errors
        raise ConfigurationError(f"{file} is not readable: {one_line(error)}") from error
    is_valid = isinstance(tensors, dict) and all(
        isinstance(name, str)
        and isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        for name, tensor in tensors.items()
    )
    if not is_valid:
        raise ConfigurationError(f"{file} does not contain tensors by name")
    return dict(tensors)


def _plain_name(name: str) -> str:
    """Returns the name in vLLM's layout of a tensor in any layout."""
    if match := _MEDUSA_LAYER.fullmatch(name):
        head, layer, kind = match.groups()
        return f"blocks.{head}.layers.{layer}.{kind}"
    if match := _MEDUSA_OUTPUT.fullmatch(name):
        return f"lm_heads.{match[1]}.weight"
    return name.removeprefix("model.").removeprefix("medusa_heads.")
