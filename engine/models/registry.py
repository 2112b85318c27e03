"""The model family of each architecture. To add a family, add a line to `FAMILIES`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from engine.models.config import gpt2_config, opt_config
from engine.models.config_fields import ConfigFieldError, ConfigFields, wrong
from engine.models.decoder import Decoder
from engine.models.decoder_config import decoder_config
from engine.models.decoder_families import (
    cohere2_config,
    cohere_config,
    ernie4_5_config,
    falcon_config,
    gemma2_config,
    gemma3_config,
    glm4_config,
    gpt_neox_config,
    granite_config,
    olmo2_config,
    olmo3_config,
    phi3_config,
    qwen2_config,
    qwen3_config,
    seed_oss_config,
    smollm3_config,
)
from engine.models.expert_families import (
    deepseek_v2_config,
    deepseek_v3_config,
    glm4_moe_config,
    glm4_moe_lite_config,
    gpt_oss_config,
    mixtral_config,
    olmoe_config,
    qwen2_moe_config,
    qwen3_moe_config,
)
from engine.models.gated_delta import (
    GatedDelta,
    qwen3_5_config,
    qwen3_5_moe_config,
    qwen3_next_config,
)
from engine.models.gemma4 import Gemma4, gemma4_config
from engine.models.gpt2 import Gpt2
from engine.models.hybrid import Lfm2, lfm2_config
from engine.models.layers import CausalModel
from engine.models.opt import Opt
from engine.models.part import WHOLE_MODEL, ModelPart

__all__ = ["FAMILIES", "ModelFamily", "family_of", "family_of_config", "text_config_of"]


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
        "CohereForCausalLM": ModelFamily("cohere", cohere_config, Decoder),
        "Cohere2ForCausalLM": ModelFamily("cohere2", cohere2_config, Decoder),
        "DeepseekV2ForCausalLM": ModelFamily("deepseek_v2", deepseek_v2_config, Decoder),
        "DeepseekV3ForCausalLM": ModelFamily("deepseek_v3", deepseek_v3_config, Decoder),
        "Ernie4_5ForCausalLM": ModelFamily("ernie4_5", ernie4_5_config, Decoder),
        "FalconForCausalLM": ModelFamily("falcon", falcon_config, Decoder),
        "Gemma2ForCausalLM": ModelFamily("gemma2", gemma2_config, Decoder),
        "Gemma3ForCausalLM": ModelFamily("gemma3_text", gemma3_config, Decoder),
        "Gemma4ForCausalLM": ModelFamily("gemma4_text", gemma4_config, Gemma4),
        "Glm4ForCausalLM": ModelFamily("glm4", glm4_config, Decoder),
        "Glm4MoeForCausalLM": ModelFamily("glm4_moe", glm4_moe_config, Decoder),
        "Glm4MoeLiteForCausalLM": ModelFamily("glm4_moe_lite", glm4_moe_lite_config, Decoder),
        "GPTNeoXForCausalLM": ModelFamily("gpt_neox", gpt_neox_config, Decoder),
        "GptOssForCausalLM": ModelFamily("gpt_oss", gpt_oss_config, Decoder),
        "GraniteForCausalLM": ModelFamily("granite", granite_config, Decoder),
        "Lfm2ForCausalLM": ModelFamily("lfm2", lfm2_config, Lfm2),
        "LlamaForCausalLM": ModelFamily("llama", decoder_config, Decoder),
        "MistralForCausalLM": ModelFamily("mistral", decoder_config, Decoder),
        "Olmo2ForCausalLM": ModelFamily("olmo2", olmo2_config, Decoder),
        "Olmo3ForCausalLM": ModelFamily("olmo3", olmo3_config, Decoder),
        "Phi3ForCausalLM": ModelFamily("phi3", phi3_config, Decoder),
        "Qwen2ForCausalLM": ModelFamily("qwen2", qwen2_config, Decoder),
        "Qwen3NextForCausalLM": ModelFamily("qwen3_next", qwen3_next_config, GatedDelta),
        "Qwen3_5ForCausalLM": ModelFamily("qwen3_5_text", qwen3_5_config, GatedDelta),
        "Qwen3_5MoeForCausalLM": ModelFamily("qwen3_5_moe_text", qwen3_5_moe_config, GatedDelta),
        "Qwen3ForCausalLM": ModelFamily("qwen3", qwen3_config, Decoder),
        "MixtralForCausalLM": ModelFamily("mixtral", mixtral_config, Decoder),
        "OlmoeForCausalLM": ModelFamily("olmoe", olmoe_config, Decoder),
        "Qwen2MoeForCausalLM": ModelFamily("qwen2_moe", qwen2_moe_config, Decoder),
        "Qwen3MoeForCausalLM": ModelFamily("qwen3_moe", qwen3_moe_config, Decoder),
        "SeedOssForCausalLM": ModelFamily("seed_oss", seed_oss_config, Decoder),
        "SmolLM3ForCausalLM": ModelFamily("smollm3", smollm3_config, Decoder),
        "OPTForCausalLM": ModelFamily("opt", opt_config, Opt),
        "GPT2LMHeadModel": ModelFamily("gpt2", gpt2_config, Gpt2),
    }
)


# By the architecture of a model that reads images too: its `model_type`, and its text part's
# architecture.
_TEXT_PARTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3ForCausalLM"),
        "Gemma4ForConditionalGeneration": ("gemma4", "Gemma4ForCausalLM"),
        "Qwen3_5ForConditionalGeneration": ("qwen3_5", "Qwen3_5ForCausalLM"),
        "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    }
)
_TEXT_CONFIG = "text_config"
_MIN_SIMILARITY = 0.8
# Fields beside the text part's config that apply to it, and come first.
_SHARED_FIELDS = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)


def family_of(architecture: str | None) -> ModelFamily:
    """Returns the family of an architecture.

    Raises:
        ConfigFieldError: the architecture is unknown; names similar ones that are known.
    """
    family = FAMILIES.get(architecture or "")
    if family is None:
        known = [*FAMILIES, *_TEXT_PARTS]
        similar = get_close_matches(architecture or "", known, cutoff=_MIN_SIMILARITY)
        hint = f"; similar ones are {', '.join(similar)}" if similar else ""
        raise ConfigFieldError(
            f"architecture {architecture!r} is unknown; docs/models.md lists the {len(known)} that "
            f"Baton knows{hint}"
        )
    return family


def family_of_config(config: Mapping[str, Any]) -> ModelFamily:
    """Returns the family of the model that a config.json describes.

    Checkpoints of the bare model and of older code list other architectures than `FAMILIES` has,
    or none. They belong to the family of their `model_type` if the architecture is one of its
    classes, such as LlamaModel or LLaMAForCausalLM.

    Raises:
        ConfigFieldError: the architecture is unknown, or has another `model_type`.
    """
    architecture, model_type = _architecture(config), config.get("model_type")
    by_type = {family.model_type: family for family in FAMILIES.values()}
    stated = by_type.get(model_type) if isinstance(model_type, str) else None
    if architecture not in FAMILIES and stated is not None and _has_class(stated, architecture):
        return stated
    family = family_of(architecture)
    if family is not stated:
        raise _wrong_type(model_type, architecture, family.model_type)
    return family


def text_config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of a model's text part; of a model that has no other parts, its own.

    Raises:
        ConfigFieldError: the model reads images too, and does not describe its text part.
    """
    architecture = _architecture(config)
    if architecture is None or architecture not in _TEXT_PARTS:
        return config
    model_type, text_architecture = _TEXT_PARTS[architecture]
    if config.get("model_type") != model_type:
        raise _wrong_type(config.get("model_type"), architecture, model_type)
    text = config.get(_TEXT_CONFIG)
    if not isinstance(text, Mapping):
        raise wrong(_TEXT_CONFIG, text, "an object")
    shared = {name: config[name] for name in _SHARED_FIELDS if config.get(name) is not None}
    usual = {"model_type": FAMILIES[text_architecture].model_type}
    return {**usual, **text, **shared, "architectures": [text_architecture]}


def _wrong_type(stated: object, architecture: str | None, expected: str) -> ConfigFieldError:
    return ConfigFieldError(f"model_type is {stated!r}; {architecture} is {expected!r}")


def _architecture(config: Mapping[str, Any]) -> str | None:
    """Returns the first architecture that config.json lists; None if it lists none."""
    stated = config.get("architectures")
    names = [stated] if isinstance(stated, str) else stated or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigFieldError(f"architectures is {stated!r}; it must be a list of texts")
    return names[0] if names else None


def _has_class(family: ModelFamily, architecture: str | None) -> bool:
    stem = family.model_type.replace("_", "")
    return architecture is None or architecture.lower().replace("_", "").startswith(stem)
