"""`ConfigFields`: the fields of a checkpoint's config.json, with the defaults of its family.

The classes of `transformers` are not used where a model is served: their import takes a worker as
long as that of torch.
"""

import sys
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from baton.common.errors import ConfigurationError
from engine.models.config_defaults import DEFAULTS, OTHER_NAMES
from engine.models.expert_defaults import EXPERT_DEFAULTS
from kernels.layer_kinds import Activation

__all__ = ["MAX_TOKENS", "ConfigFieldError", "ConfigFields", "positive", "unsupported", "wrong"]

# The names of transformers; several programs that compute one function in other ways had their own.
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "relu": Activation.RELU,
        "gelu": Activation.GELU,
        "gelu_python": Activation.GELU,
        "gelu_accurate": Activation.GELU_TANH,
        "gelu_fast": Activation.GELU_TANH,
        "gelu_new": Activation.GELU_TANH,
        "gelu_python_tanh": Activation.GELU_TANH,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "silu": Activation.SILU,
        "swish": Activation.SILU,
    }
)
_DTYPE_NAMES = {"float": "float32", "half": "float16"}  # torch's other names
_MAX_SHOWN = 200
FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {**DEFAULTS, **EXPERT_DEFAULTS}
"""The defaults of config.json by `model_type`."""
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
        raw_fields: the content of config.json.
        model_type: the family's name in it.
    """

    def __init__(self, raw_fields: Mapping[str, Any], model_type: str) -> None:
        self._given = raw_fields
        self._defaults = FAMILY_DEFAULTS[model_type]
        self._other_names = OTHER_NAMES.get(model_type, {})

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

    def states(self, name: str) -> bool:
        """Whether config.json has a field, even if it is null."""
        return name in self._given

    def has(self, name: str) -> bool:
        """Whether the family reads a field of this name."""
        return name in self._defaults

    def value(self, name: str) -> Any:
        """A field of any type, or its default."""
        other = self._other_names.get(name, name)
        default = self._defaults[name]
        return self._given.get(name, self._given.get(other, default))

    def default(self, name: str) -> Any:
        """The default of a field that the family reads."""
        return self._defaults[name]

    def optional(self, name: str) -> Any:
        """A field of any type, or its default; None if it is absent and has none."""
        return self.value(name) if self.has(name) else self.raw(name)

    def count(self, name: str, max_value: int = sys.maxsize) -> int:
        """A positive integer of at most `max_value`.

        Raises:
            ConfigFieldError: it is none; as all methods below, names the field.
        """
        value = self.value(name)
        if not _is_integer(value) or value < 1:
            raise wrong(name, value, "a positive integer")
        if value > max_value:
            raise wrong(name, value, f"an integer of at most {max_value}")
        return int(value)

    def optional_count(self, name: str, max_value: int = sys.maxsize) -> int | None:
        """A positive integer of at most `max_value`, or None."""
        return None if self.value(name) is None else self.count(name, max_value)

    def integer(self, name: str) -> int:
        """An integer."""
        value = self.value(name)
        if not _is_integer(value):
            raise wrong(name, value, "an integer")
        return int(value)

    def number(self, name: str) -> float:
        """A positive number."""
        return positive(name, self.value(name))

    def optional_number(self, name: str) -> float | None:
        """A positive number, or None."""
        return None if self.value(name) is None else self.number(name)

    def epsilon(self, name: str) -> float:
        """A positive number, or zero."""
        value = self.value(name)
        is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
        return 0.0 if is_zero else positive(name, value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.value(name)
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        """A text."""
        value = self.value(name)
        if not isinstance(value, str):
            raise wrong(name, value, "a text")
        return value

    def activation(self, name: str, supported: Collection[Activation]) -> Activation:
        """One of the supported functions."""
        stated = self.text(name)
        activation = _ACTIVATIONS.get(stated)
        if activation is None or activation not in supported:
            raise unsupported(name, stated)
        return activation


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
        raise wrong(name, value, "a positive number")
    number: float = value
    return number


def wrong(name: str, value: Any, kind: str) -> ConfigFieldError:
    """Returns the error for a field with a value of the wrong kind, such as "a text"."""
    return ConfigFieldError(f"{name} is {_shown(value)}; it must be {kind}")


def _shown(value: Any) -> str:
    """Returns a value as an error shows it, on one line and not too long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
