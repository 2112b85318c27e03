"""`SpeculativeConfig`: what `--speculative-config` says. Pure."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from typing_extensions import override

from baton.common.errors import ConfigurationError

__all__ = [
    "DRAFT_MODEL",
    "LOOKUP_METHODS",
    "MAX_SPECULATIVE_TOKENS",
    "MODEL_METHODS",
    "SpeculativeConfig",
]

LOOKUP_METHODS = ("ngram", "suffix")
DRAFT_MODEL = "draft_model"
_HEADS = ("medusa", "eagle", "eagle3")
MODEL_METHODS = (DRAFT_MODEL, *_HEADS)
_METHODS = (*LOOKUP_METHODS, *MODEL_METHODS)
MAX_SPECULATIVE_TOKENS = 64
_MAX_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How an engine drafts tokens. The keys are vLLM's, as far as it has them.

    Attributes:
        method: "ngram" looks the latest tokens up in the request itself, "suffix" also in earlier
            answers of the replica; "draft_model" draws them from a smaller model; "medusa",
            "eagle" and "eagle3" from heads over the served model's hidden states.
        model: the smaller model or the heads: a checkpoint folder or a name; for a model also a
            GGUF file.
        num_speculative_tokens: the most draft tokens in one step.
        prompt_lookup_min: the fewest equal tokens before a draft token.
        prompt_lookup_max: the most tokens that are compared.
        max_cached_tokens: tokens of earlier answers that "suffix" keeps.

    Raises:
        ConfigurationError: a value is out of range; names the key.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 8
    max_cached_tokens: int = 2**18

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise _bad_key("method", self.method, f"one of {', '.join(_METHODS)}")
        if self.has_model and not (isinstance(self.model, str) and self.model):
            raise _bad_key("model", self.model, "a model that drafts for the served one")
        if self.model is not None and not self.has_model:
            raise _bad_key("model", self.model, f"absent with the method {self.method}")
        limits = {
            "num_speculative_tokens": (1, MAX_SPECULATIVE_TOKENS),
            "prompt_lookup_min": (1, _MAX_WIDTH),
            "prompt_lookup_max": (self.prompt_lookup_min, _MAX_WIDTH),
            "max_cached_tokens": (1024, 2**22),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise _bad_key(name, value, f"a number from {least} to {most}")

    def check_ranks(self, num_ranks: int) -> None:
        """Refuses a model of draft tokens for an engine of several ranks."""
        if num_ranks > 1 and self.has_model:
            raise ConfigurationError(
                f"--speculative-config has a model, and the engine {num_ranks} ranks: "
                "use the method ngram or suffix"
            )

    @property
    def has_model(self) -> bool:
        """Whether a model or heads make the draft tokens."""
        return self.method in MODEL_METHODS

    @property
    def reads_states(self) -> bool:
        """Whether draft tokens are made from hidden states of the served model."""
        return self.method in _HEADS

    @override
    def __str__(self) -> str:
        """The JSON object that `of` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, value: "str | Mapping[str, Any] | SpeculativeConfig") -> "SpeculativeConfig":
        """Reads a JSON object, or a mapping with the same keys.

        Raises:
            ConfigurationError: it is not such an object; names the key.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigurationError(
                    f"--speculative-config is not a JSON object: {error}"
                ) from error
        if not isinstance(value, Mapping):
            raise ConfigurationError("--speculative-config is not a JSON object")
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                raise ConfigurationError(
                    f"--speculative-config has an unknown key {name!r}; it takes {', '.join(known)}"
                )
        if "model" in value and "method" not in value:
            value = {"method": DRAFT_MODEL, **value}
        if "method" not in value:
            raise _bad_key("method", None, f"one of {', '.join(_METHODS)}")
        return cls(**value)


def _bad_key(name: str, value: object, limit: str) -> ConfigurationError:
    return ConfigurationError(f"{name} of --speculative-config is {value!r}; it must be {limit}")
