"""Which model serves which architecture. To add a family, add its line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from baton.errors import ConfigurationError
from engine.models.config import decoder_config, gpt2_config, opt_config
from engine.models.decoder import Decoder
from engine.models.gpt2 import Gpt2
from engine.models.layers import CausalModel
from engine.models.opt import Opt

__all__ = ["FAMILIES", "ModelFamily", "family_of"]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How to make a model of one architecture.

    Attributes:
        model_type: config.json's name for the family's config.
        read_config: from the `transformers` config to the family's own; raises
            ConfigurationError for what is not supported.
        build: from that to a model on torch's current default device, its
            weights not set.
    """

    model_type: str
    read_config: Callable[[Any], Any]
    build: Callable[[Any], CausalModel]


# By config.json's architecture.
FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        "LlamaForCausalLM": ModelFamily("llama", decoder_config, Decoder),
        "MistralForCausalLM": ModelFamily(
            "mistral", partial(decoder_config, windowed=True), Decoder
        ),
        "Qwen2ForCausalLM": ModelFamily(
            "qwen2", partial(decoder_config, qkv_bias=True, windowed=True), Decoder
        ),
        "Qwen3ForCausalLM": ModelFamily(
            "qwen3", partial(decoder_config, qk_norm=True, windowed=True), Decoder
        ),
        "OPTForCausalLM": ModelFamily("opt", opt_config, Opt),
        "GPT2LMHeadModel": ModelFamily("gpt2", gpt2_config, Gpt2),
    }
)


def family_of(architecture: str | None) -> ModelFamily:
    """The family that serves an architecture.

    Raises:
        ConfigurationError: there is none; lists the known ones.
    """
    family = FAMILIES.get(architecture or "")
    if family is None:
        raise ConfigurationError(
            f"config.json: architecture {architecture!r} is unknown; "
            f"known are {', '.join(FAMILIES)}"
        )
    return family
