"""Loads heads that guess tokens: small checkpoints that belong to a served model.

The layouts are those of published checkpoints: of EAGLE and Medusa's own repositories, and of
vLLM. Their weights are safetensors files, or torch's, of which only tensors are read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from baton.errors import ConfigurationError
from engine.models.config import DecoderConfig, decoder_config
from engine.models.config_fields import ConfigFields
from engine.models.eagle import Eagle3Head, EagleHead
from engine.models.layers import CausalModel, checkpoint_tensors
from engine.models.medusa import MedusaConfig, MedusaHeads
from engine.runtime.checkpoint import one_line, open_checkpoint
from engine.runtime.loader import LoadedModel, allocate_modules

__all__ = ["HeadCheckpoint", "load_eagle", "load_eagle3", "load_medusa"]

_OTHER_WEIGHTS = ("medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
_MEDUSA_LAYER = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
_MEDUSA_OUTPUT = re.compile(r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight")
# Tensors that a head shares with the served model, or that follow from others.
_UNUSED = re.compile(r"(embed_tokens\.weight|t2d|.*rotary_emb\.inv_freq)")


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """The checkpoint of a head.

    Attributes:
        name: as the user has given it, for error messages.
        config: content of config.json.
        tensors: by name.
    """

    name: str
    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, name: str) -> "HeadCheckpoint":
        """Reads a checkpoint folder, or downloads it from the Hugging Face Hub.

        Raises:
            ConfigurationError: it is missing or broken.
        """
        checkpoint = open_checkpoint(name, other_weights=_OTHER_WEIGHTS)
        tensors: dict[str, torch.Tensor] = {}
        for file in checkpoint.weight_files:
            tensors |= _read_tensors(file)
        return cls(name, checkpoint.config, {_plain_name(key): tensors[key] for key in tensors})

    def fill(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates a head's weights and fills them.

        Raises:
            ConfigurationError: a tensor is missing, unknown, or has another shape.
        """
        allocate_modules(module, dtype, device)
        expected = checkpoint_tensors(module)
        for name in self.tensors.keys() - expected.keys():
            if not _UNUSED.fullmatch(name):
                raise self.error(f"has tensor {name}, which such a head does not have")
        for name, parts in expected.items():
            if name not in self.tensors:
                raise self.error(f"lacks tensor {name}")
            tensor = self.tensors[name]
            if tuple(tensor.shape) != parts[0].tensor_shape:
                shapes = f"{list(tensor.shape)} instead of {list(parts[0].tensor_shape)}"
                raise self.error(f"has tensor {name} of shape {shapes}")
            for part in parts:
                part.target.copy_(tensor[part.index].to(dtype=dtype, device=device))

    def error(self, problem: str) -> ConfigurationError:
        """Returns an error that names the checkpoint."""
        return ConfigurationError(
            f"model of --speculative-config is {self.name!r}, which {problem}"
        )

    def take_guessable(self, name: str, num_served: int, *, adds: bool) -> torch.Tensor | None:
        """Removes the tensor of the tokens that the head can guess, and returns their ids.

        Args:
            name: the tensor's.
            num_served: number of the served model's tokens.
            adds: whether it has distances from the head's ids to the served model's.

        Returns:
            `[num_guessable]` int64; None if the head can guess all tokens.

        Raises:
            ConfigurationError: the served model does not have one of them.
        """
        ids = self.tensors.pop(name, None)
        if ids is None:
            return None
        ids = ids.long() + torch.arange(len(ids)) if adds else ids.long()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_served:
            raise self.error(f"guesses tokens that the served model does not have: see {name}")
        return ids


def load_medusa(
    name: str, served: LoadedModel, device: torch.device
) -> tuple[MedusaHeads, torch.Tensor | None]:
    """Loads Medusa heads.

    Returns:
        The heads, and the ids of the tokens that they guess, `[n]` int64; None for all tokens.

    Raises:
        ConfigurationError: the checkpoint is missing or broken, or does not fit the served model.
    """
    checkpoint = HeadCheckpoint.read(name)
    guessable = checkpoint.take_guessable("token_map", served.vocab_size, adds=False)
    tensors = checkpoint.tensors
    first = tensors.get("lm_heads.0.weight")
    if first is None or first.dim() != 2:
        raise checkpoint.error("lacks tensor lm_heads.0.weight: it has no Medusa heads")
    num_tokens, hidden_size = first.shape
    _check_width(checkpoint, hidden_size, served)
    _check_num_tokens(checkpoint, num_tokens, guessable, served)
    config = MedusaConfig(
        hidden_size=hidden_size,
        num_heads=sum(name.startswith("lm_heads.") for name in tensors),
        num_layers=sum(bool(re.match(r"blocks\.0\.layers\.\d+\.weight", name)) for name in tensors),
        num_tokens=num_tokens,
        has_bias="blocks.0.layers.0.bias" in tensors,
    )
    with torch.device("meta"):
        heads = MedusaHeads(config)
    checkpoint.fill(heads, getattr(torch, served.dtype), device)
    return heads.eval(), guessable


def load_eagle(
    name: str, served: LoadedModel, window: int, device: torch.device
) -> tuple[EagleHead, tuple[int, ...]]:
    """Loads a head of EAGLE.

    Args:
        name: a checkpoint folder, or a name on the Hugging Face Hub.
        served: the served model.
        window: number of tokens that the head sees.
        device: of the head.

    Returns:
        The head, and the states of the served model that it reads, as in `KeptStates.layers`.

    Raises:
        ConfigurationError: the checkpoint is missing or broken, or does not fit the served model.
    """
    checkpoint = HeadCheckpoint.read(name)
    checkpoint.tensors.pop("lm_head.weight", None)  # the served model's
    config = _config_of(checkpoint, served, window)
    config = replace(config, tie_word_embeddings=True, vocab_size=served.vocab_size)
    with torch.device("meta"):
        head = EagleHead(
            config,
            has_bias="fc.bias" in checkpoint.tensors,
            served_logits=served.model.logits,
        )
    checkpoint.fill(head, getattr(torch, served.dtype), device)
    return head.eval(), (served.model.config.num_layers,)


def load_eagle3(
    name: str, served: LoadedModel, window: int, device: torch.device
) -> tuple[Eagle3Head, tuple[int, ...], torch.Tensor | None]:
    """Loads a head of EAGLE-3; the arguments and errors are those of `load_eagle`.

    Returns:
        The head, the states of the served model that it reads, and the ids of the tokens that it
        guesses, `[n]` int64; None for all tokens.
    """
    checkpoint = HeadCheckpoint.read(name)
    guessable = checkpoint.take_guessable("d2t", served.vocab_size, adds=True)
    config, output = (
        _config_of(checkpoint, served, window),
        checkpoint.tensors.get("lm_head.weight"),
    )
    if output is None:
        raise checkpoint.error("lacks tensor lm_head.weight: it is no head of EAGLE-3")
    _check_num_tokens(checkpoint, len(output), guessable, served)
    config = replace(config, tie_word_embeddings=False, vocab_size=len(output))
    norms_residual = bool(checkpoint.config.get("norm_before_residual", False))
    with torch.device("meta"):
        head = Eagle3Head(config, norms_residual=norms_residual)
    checkpoint.fill(head, getattr(torch, served.dtype), device)
    return head.eval(), _layers_of(checkpoint, served.model), guessable


def _config_of(checkpoint: HeadCheckpoint, served: LoadedModel, window: int) -> DecoderConfig:
    """Reads the shape of an EAGLE head."""
    has_bias = any(name.endswith("q_proj.bias") for name in checkpoint.tensors)
    config = decoder_config(ConfigFields(checkpoint.config, "llama"), qkv_bias=has_bias)
    if config.num_layers != 1:
        raise checkpoint.error(f"has {config.num_layers} layers; heads have one")
    _check_width(checkpoint, config.hidden_size, served)
    embedding = served.model.word_embedding
    if embedding is None or embedding.weight.num_columns != config.hidden_size:
        raise checkpoint.error("needs embeddings as wide as the served model's states")
    return replace(config, sliding_windows=(window,))


def _layers_of(checkpoint: HeadCheckpoint, model: CausalModel) -> tuple[int, ...]:
    """Returns the layers whose inputs a head of EAGLE-3 reads."""
    num_layers = model.config.num_layers
    given = checkpoint.config.get("eagle_config") or {}
    layers = given.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        layers = [2, num_layers // 2, num_layers - 3]
    is_valid = isinstance(layers, list) and len(layers) == 3
    if not is_valid or any(
        type(layer) is not int or not 0 <= layer < num_layers for layer in layers
    ):
        raise checkpoint.error(
            f"reads the layers {layers}; it must be three of the served model's {num_layers}"
        )
    return tuple(layers)


def _check_width(checkpoint: HeadCheckpoint, width: int, served: LoadedModel) -> None:
    hidden_size = served.model.config.hidden_size
    if width != hidden_size:
        raise checkpoint.error(
            f"reads states of width {width}; the served model's are {hidden_size}"
        )


def _check_num_tokens(
    checkpoint: HeadCheckpoint, num_tokens: int, guessable: torch.Tensor | None, served: LoadedModel
) -> None:
    expected = served.vocab_size if guessable is None else len(guessable)
    if num_tokens != expected:
        raise checkpoint.error(f"has outputs for {num_tokens} tokens instead of {expected}")


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            tensors: Any = load_file(file)
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # both have many kinds of errors
        raise ConfigurationError(f"{file} is not readable: {one_line(error)}") from error
    is_valid = isinstance(tensors, dict) and all(
        isinstance(tensor, torch.Tensor) for tensor in tensors.values()
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
