"""The model family of each architecture. To add a family, add a line to `FAMILIES`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from baton.errors import ConfigurationError
from engine.models.config import decoder_config, gpt2_config, opt_config
from engine.models.config_fields import ConfigFields
from engine.models.decoder import Decoder
from engine.models.gpt2 import Gpt2
from engine.models.layers import CausalModel
from engine.models.opt import Opt
from engine.models.part import WHOLE_MODEL, ModelPart

__all__ = ["FAMILIES", "ModelFamily", "family_of"]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How to build a model of one architecture.

    Attributes:
        model_type: the `model_type` in the family's config.json.
        read_config: makes the family's config of config.json's fields; raises
            ConfigurationError for unsupported values.
        model: makes a part of a model of the family's config.
    """

    model_type: str
    read_config: Callable[[ConfigFields], Any]
    model: Callable[[Any, ModelPart], CausalModel]

    def build(self, config: Any, part: ModelPart = WHOLE_MODEL) -> CausalModel:
        """Builds a model on torch's default device, with uninitialized weights.

        Args:
            config: of `read_config`.
            part: the part of the model.

        Raises:
            ConfigurationError: it cannot be divided among that many ranks or stages.
        """
        return self.model(config, part)


# By the architecture in config.json.
FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        "LlamaForCausalLM": ModelFamily("llama", decoder_config, Decoder),
        "MistralForCausalLM": ModelFamily(
            "mistral", partial(decoder_config, windows="always"), Decoder
        ),
        "Qwen2ForCausalLM": ModelFamily(
            "qwen2", partial(decoder_config, qkv_bias=True, windows="optional"), Decoder
        ),
        "Qwen3ForCausalLM": ModelFamily(
            "qwen3", partial(decoder_config, qk_norm=True, windows="optional"), Decoder
        ),
        "OPTForCausalLM": ModelFamily("opt", opt_config, Opt),
        "GPT2LMHeadModel": ModelFamily("gpt2", gpt2_config, Gpt2),
    }
)


def family_of(architecture: str | None) -> ModelFamily:
    """Returns the family of an architecture.

    Raises:
        ConfigurationError: the architecture is unknown; lists the known ones.
    """
    family = FAMILIES.get(architecture or "")
    if family is None:
        raise ConfigurationError(
            f"config.json: architecture {architecture!r} is unknown; "
            f"known are {', '.join(FAMILIES)}"
        )
    return family
