"""`ConfigFields`: the fields of a checkpoint's config.json, with the defaults of its family.

Defaults, and what older names mean, are those of `transformers` 5. Its own classes are not used
where a model is served: their import takes a worker as long as that of torch.
"""

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from baton.common.errors import ConfigurationError

__all__ = ["MAX_TOKENS", "ConfigFieldError", "ConfigFields", "positive", "unsupported"]

_DECODER: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_QWEN = _DECODER | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
# By model_type.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _DECODER,
        "mistral": _DECODER
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
        },
        "qwen2": _QWEN,
        "qwen3": _QWEN | {"head_dim": 128},
        "opt": {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
        "gpt2": {
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "n_inner": None,
            "max_position_embeddings": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
    }
)
# Other names that config.json may have, by model_type.
_OTHER_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        }
    }
)
_DTYPE_NAMES = {"float": "float32", "half": "float16"}  # torch's other names
_MAX_SHOWN = 200
MAX_TOKENS = 2**31 - 1
"""The largest context length; messages between tiers have it in 32 bits."""


class ConfigFieldError(ConfigurationError):
    """A field of config.json has a value that Baton does not support.

    Args:
        problem: the field, its value and the limit.

    Attributes:
        problem: the same, for a message that names the file's folder too.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"config.json: {problem}")
        self.problem = problem


class ConfigFields:
    """Reads fields by name, and checks their types.

    Args:
        given: the content of config.json.
        model_type: the family's name in it, which must be a key of the registry's families.
    """

    def __init__(self, raw_fields: Mapping[str, Any], model_type: str) -> None:
        self._given = raw_fields
        self._defaults = _DEFAULTS[model_type]
        self._other_names = _OTHER_NAMES.get(model_type, {})

    @property
    def dtype(self) -> str | None:
        """The type of the checkpoint's weights; None if config.json has none."""
        name = self._given.get("dtype")
        name = self._given.get("torch_dtype") if name is None else name
        if name is None:
            return None
        plain_name = str(name).removeprefix("torch.")
        return _DTYPE_NAMES.get(plain_name, plain_name)

    def raw(self, name: str) -> Any:
        """A field as it is in config.json; None if it is absent."""
        return self._given.get(name)

    def count(self, name: str, max_value: int = sys.maxsize) -> int:
        """A positive integer of at most `max_value`.

        Raises:
            ConfigFieldError: it is none; as all methods below, names the field.
        """
        value = self._value(name)
        if not _is_integer(value) or value < 1:
            raise _wrong(name, value, "a positive integer")
        if value > max_value:
            raise _wrong(name, value, f"an integer of at most {max_value}")
        return int(value)

    def optional_count(self, name: str, max_value: int = sys.maxsize) -> int | None:
        """A positive integer of at most `max_value`, or None."""
        return None if self._value(name) is None else self.count(name, max_value)

    def integer(self, name: str) -> int:
        """An integer."""
        value = self._value(name)
        if not _is_integer(value):
            raise _wrong(name, value, "an integer")
        return int(value)

    def epsilon(self, name: str) -> float:
        """A positive number, or zero."""
        value = self._value(name)
        is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
        return 0.0 if is_zero else positive(name, value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._value(name)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        """A text."""
        value = self._value(name)
        if not isinstance(value, str):
            raise _wrong(name, value, "a text")
        return value

    def rope_parameters(self) -> dict[str, Any]:
        """The parameters of rotary embedding: `rope_parameters`, or older fields in its place.

        Has `rope_type` and `rope_theta`, and `original_max_position_embeddings` for types that
        scale by it: config.json's own field of that name comes before the object's. A `factor` of
        YaRN that is null is the quotient of both lengths; one that is absent is an error.
        """
        name = "rope_scaling" if self.raw("rope_scaling") else "rope_parameters"
        value = self.raw(name)
        if value is not None and not isinstance(value, Mapping):
            raise _wrong(name, value, "an object")
        parameters = dict(value or {})
        parameters.setdefault("rope_theta", self._value("rope_theta"))
        if (rotated := self.raw("partial_rotary_factor")) is not None:
            parameters.setdefault("partial_rotary_factor", rotated)
        parameters.setdefault("rope_type", parameters.get("type", "default"))
        if parameters["rope_type"] in ("llama3", "yarn"):
            name = "original_max_position_embeddings"
            if name in self._given:
                parameters[name] = self.raw(name)
            parameters.setdefault(name, self.count("max_position_embeddings"))
            if parameters["rope_type"] == "yarn" and parameters.get("factor", 0) is None:
                extended = self.count("max_position_embeddings")
                parameters["factor"] = extended / positive(name, parameters[name])
        return parameters

    def _value(self, name: str) -> Any:
        other = self._other_names.get(name, name)
        default = self._defaults[name]
        return self._given.get(name, self._given.get(other, default))


def unsupported(field: str, value: Any) -> ConfigFieldError:
    """Returns the error for a config.json field with a value that Baton does not support."""
    return ConfigFieldError(f"{field} {_shown(value)} is not supported")


def positive(name: str, value: Any) -> float:
    """Returns a number.

    Raises:
        ConfigFieldError: it is not a positive, finite number; names it.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise _wrong(name, value, "a positive number")
    number: float = value
    return number


def _wrong(name: str, value: Any, kind: str) -> ConfigFieldError:
    return ConfigFieldError(f"{name} is {_shown(value)}; it must be {kind}")


def _shown(value: Any) -> str:
    """Returns a value as an error shows it, on one line and not too long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
