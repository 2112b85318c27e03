"""`HeaderValues`: the keys of a GGUF file's architecture, checked as they are read."""

import math
from collections.abc import Mapping, Set
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.model_files.gguf.header import GgufHeader

__all__ = ["WINDOW_KEYS", "HeaderValues"]

WINDOW_KEYS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
"""Keys that `HeaderValues.sliding_window` and `layer_types` read."""

# Values with which keys that are not read change nothing, besides 0 and false.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "embedding_scale": (1,),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_scale": (1,),
    "logit_scale": (1,),
    "residual_scale": (1,),
    # Converters of all architectures write their files in one order, whatever they name it.
    "tensor_data_layout": ("reference", "Meta AI original pth"),
}
_MAX_INTEGER = 2**31 - 1
_MAX_LAYERS = 1024  # a malformed file may state billions, for each of which modules are made


class HeaderValues:
    """The keys of an architecture, such as `llama.block_count`.

    Args:
        header: of the file.
        architecture: prefix of the keys.
    """

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self._prefix = f"{architecture}."

    @property
    def num_blocks(self) -> int:
        """The number of layers, with those that draft tokens.

        Raises:
            ConfigurationError: it is missing, or too large.
        """
        num_blocks = self.integer("block_count")
        if num_blocks > _MAX_LAYERS:
            raise self.unsupported("block_count")
        return num_blocks

    @property
    def num_layers(self) -> int:
        """The number of layers that a token goes through; the layers after them draft tokens.

        Raises:
            ConfigurationError: it is missing, too large, or not positive.
        """
        key = "nextn_predict_layers"
        num_drafting = self._scalar(key, 0)
        if type(num_drafting) is not int or not 0 <= num_drafting < self.num_blocks:
            raise self.unsupported(key)
        return self.num_blocks - num_drafting

    @property
    def mlp_width(self) -> int:
        """The width of an MLP; in models that state none, that of an expert.

        Raises:
            ConfigurationError: neither is stated.
        """
        width = "expert_feed_forward_length"
        return self.integer("feed_forward_length", self.integer(width) if self.has(width) else None)

    @property
    def head_dim(self) -> int:
        """The width of a head.

        Raises:
            ConfigurationError: it is not stated, and does not follow from other keys.
        """
        num_heads, width = self.integer("attention.head_count"), self.integer("embedding_length")
        return self.integer("attention.key_length", width // num_heads)

    def name(self, key: str) -> str:
        """Returns a key's name in the file."""
        return self._prefix + key

    def has(self, key: str) -> bool:
        """Whether the file states a key."""
        return self.name(key) in self.header.metadata

    def unsupported(self, key: str) -> ConfigurationError:
        """Returns the error for a key whose value is not supported."""
        value = self.header.metadata.get(self.name(key))
        return self.header.refuse(f"{self.name(key)} {value!r} is not supported")

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer.

        Raises:
            ConfigurationError: it is missing and has no default, or is something else.
        """
        value = self._value(key, default)
        if type(value) is not int or not 0 < value <= _MAX_INTEGER:
            raise self.unsupported(key)
        return value

    def per_layer(self, key: str) -> list[int]:
        """Returns an integer per layer, which may be 0.

        Raises:
            ConfigurationError: it is missing or something else.
        """
        value = self.header.metadata.get(self.name(key))
        values = [value] * self.num_layers if type(value) is int else value
        if not isinstance(values, list) or len(values) != self.num_layers:
            raise self.unsupported(key)
        if not all(type(number) is int and 0 <= number <= _MAX_INTEGER for number in values):
            raise self.unsupported(key)
        return values

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive, finite number.

        Raises:
            ConfigurationError: it is missing and has no default, or is something else.
        """
        value = self._value(key, default)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise self.unsupported(key)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Returns true or false.

        Raises:
            ConfigurationError: it is something else.
        """
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.unsupported(key)
        return value

    def sliding_window(self, default: int | None = None) -> int | None:
        """Returns the number of tokens that a query sees in layers with a window.

        None stands for all of them, which 0 means in files too.

        Raises:
            ConfigurationError: it is no number of tokens.
        """
        key = "attention.sliding_window"
        if self._scalar(key) in (0, None) and (default is None or self.has(key)):
            return None
        return self.integer(key, default)

    def layer_types(self, period: int) -> list[str]:
        """Returns the names that config.json has for layers with a window and without.

        Args:
            period: for files without a pattern: every so many layers, the last one has no window.

        Raises:
            ConfigurationError: the pattern is malformed.
        """
        key = "attention.sliding_window_pattern"
        pattern = self.header.metadata.get(self.name(key), period)
        if type(pattern) is int and pattern > 0:
            pattern = [layer % pattern < pattern - 1 for layer in range(self.num_layers)]
        if not isinstance(pattern, list) or len(pattern) != self.num_layers:
            raise self.unsupported(key)
        return ["sliding_attention" if slides else "full_attention" for slides in pattern]

    def refuse_others(self, known: Set[str]) -> None:
        """Refuses keys that are not read; they change what the model computes.

        Args:
            known: the keys that are read, besides those of the scaling of rotary embeddings.

        Raises:
            ConfigurationError: a key is unknown, and its value changes something.
        """
        for key, value in self.header.metadata.items():
            name = key.removeprefix(self._prefix)
            is_known = name in known or name.startswith("rope.scal")
            if name != key and not is_known and not self._is_neutral(name, value):
                raise self.unsupported(name)
        if not self.header.metadata.get(self.name("attention.causal"), True):
            raise self.unsupported("attention.causal")

    def _value(self, key: str, default: Any) -> Any:
        """Returns a value that all layers share; the default if the file does not state it."""
        value = self._scalar(key, default)
        if value is None:
            raise self.header.refuse(f"it has no {self.name(key)}")
        return value

    def _scalar(self, key: str, default: Any = None) -> Any:
        """Returns a value; that of all layers if the key has an equal one for each layer."""
        value = self.header.metadata.get(self.name(key), default)
        if not isinstance(value, list) or key == "block_count":
            return value
        is_per_layer = len(value) == self._scalar("block_count")
        return value[0] if is_per_layer and value.count(value[0]) == len(value) else value

    def _is_neutral(self, key: str, value: Any) -> bool:
        """Whether the model computes the same with and without a key that is not read."""
        if key == "attention.sliding_window":  # no query sees fewer tokens than there are
            window = self._scalar(key)
            return type(window) is int and (window == 0 or window >= self.integer("context_length"))
        if key == "rope.freq_base_swa":  # of layers with a window
            return bool(value == self._scalar("rope.freq_base"))
        return not value or value in _NEUTRAL.get(key, ())
