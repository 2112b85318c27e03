"""`DescribedModel`: the model that a checkpoint's files describe, and its end-of-sequence ids."""

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.common.errors import ConfigurationError
from engine.config import DTYPES
from engine.models.config_fields import ConfigFieldError, ConfigFields
from engine.models.layers import CausalModel
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.models.registry import ModelFamily, family_of_config, text_config_of
from engine.runtime.weights.checkpoint import Checkpoint, one_line
from engine.runtime.weights.stored_tensors import first_float_dtype

__all__ = ["DescribedModel", "read_eos_token_ids"]

_GENERATION_CONFIG = "generation_config.json"
_CONFIG = "config.json"
_FIELD = "eos_token_id"
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")
_DRAFTING_LAYER = re.compile(r"(?:^|\.)mtp\.")
_logger = logging.getLogger("baton.engine")


def read_eos_token_ids(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end a generation.

    These are the ids of generation_config.json, or else of config.json, and that of the
    tokenizer's own end-of-sequence token: for some chat models only the tokenizer names the
    token that ends a turn. vLLM takes the same ids. An id without a row in the logits, such as
    -1, cannot be drawn and is left out.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of rows of the logits.

    Raises:
        ConfigurationError: a file cannot be read, or states something else than integers; names
            the file.
    """
    stated = _stated_ids(checkpoint)
    tokenizer_id = checkpoint.files.eos_token_id()
    ids = dict.fromkeys([*stated, *([] if tokenizer_id is None else [tokenizer_id])])
    usable = tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)
    if len(usable) < len(ids):
        unusable = ", ".join(str(token_id) for token_id in ids if token_id not in usable)
        _logger.warning(
            "%s: %s %s is left out; the model has the tokens 0 to %d",
            *(checkpoint.files.path, _FIELD, unusable, vocab_size - 1),
        )
    return usable


def _stated_ids(checkpoint: Checkpoint) -> list[int]:
    """Returns the ids that the first file with such an entry states."""
    generation = checkpoint.read_json(_GENERATION_CONFIG)
    own = text_config_of(checkpoint.config)
    for name, fields in ((_GENERATION_CONFIG, generation), (_CONFIG, own)):
        if fields.get(_FIELD) is not None:
            return _token_ids(fields[_FIELD], str(checkpoint.files.locate(name)))
    return []


def _token_ids(value: Any, file: str) -> list[int]:
    """Returns the ids that a file's entry states: one, or a list of them."""
    ids = value if isinstance(value, list) else [value]
    if not all(_is_integer(token_id) for token_id in ids):
        raise ConfigurationError(
            f"{file}: {_FIELD} is {value!r}; it must be an integer or a list of integers"
        )
    return [int(token_id) for token_id in ids]


def _is_integer(value: Any) -> bool:
    """Whether a value of a JSON file is an integer; some programs write integers as 2.0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, int) or value.is_integer())


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model's family and shape. Errors name the file.

    Attributes:
        checkpoint: the checkpoint.
        family: the family.
        config: the family's config of the model.
        stated_dtype: type of the weights by config.json; None if it states none.
    """

    checkpoint: Checkpoint
    family: ModelFamily
    config: Any
    stated_dtype: str | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, max_model_len: int | None = None) -> "DescribedModel":
        """Reads config.json.

        Args:
            checkpoint: the checkpoint.
            max_model_len: the longest sequence that is served; None for the model's limit.

        Raises:
            ConfigurationError: the family is unknown, or a field has an unsupported value.
        """
        with _config_errors(checkpoint):
            described = text_config_of(checkpoint.config)
            family = family_of_config(described)
            fields = ConfigFields(described, family.model_type)
            config = family.read_config(fields)
            return cls(
                checkpoint,
                family,
                config if max_model_len is None else config.limited_to(max_model_len),
                fields.dtype,
            )

    def untied(self) -> "DescribedModel":
        """Returns the same model with an output head that has weights of its own."""
        return replace(self, config=replace(self.config, tie_word_embeddings=False))

    def stored_as(self, names: Collection[str]) -> "DescribedModel":
        """Returns the same model for a checkpoint that has tensors of these names.

        Those of layers that are not served count for nothing, as they may have another form.
        """
        served = [name for name in sorted(names) if self._is_served(name)]
        return replace(self, config=self.config.stored_as(served))

    def _is_served(self, name: str) -> bool:
        layer = _LAYER.search(name)
        is_beyond = layer is not None and int(layer[1]) >= self.config.num_layers
        return not is_beyond and not _DRAFTING_LAYER.search(name)

    def build(self, part: ModelPart = WHOLE_MODEL) -> CausalModel:
        """Builds a part of the model on torch's device "meta".

        Raises:
            ConfigurationError: it cannot be divided into such parts, or its numbers are too
                large.
        """
        with _config_errors(self.checkpoint), torch.device("meta"):
            return self.family.build(self.config, part)

    def resolve_dtype(self, dtype: str) -> str:
        """Returns the name of the type that the weights are loaded in.

        Args:
            dtype: `EngineConfig.dtype`. "auto" is config.json's type; that of the first weights if
                it has none; float32 if the checkpoint was opened without weights. It is bfloat16
                for quantized weights with config.json's float16, which their tools require: the
                CPU's kernels have no float16.

        Raises:
            ConfigurationError: weights cannot be loaded in that type, or a file is not readable.
        """
        name: str | None = dtype
        if dtype == "auto":
            name = self.stated_dtype or first_float_dtype(self.checkpoint.weight_files)
            if name == "float16" and self.config.quantization is not None:
                name = "bfloat16"
        name = name or "float32"
        if name not in DTYPES[1:]:
            raise ConfigurationError(
                f"{self.checkpoint.files.path}: dtype {name} is not supported; "
                f"--dtype takes {', '.join(DTYPES)}"
            )
        return name


@contextmanager
def _config_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Completes errors about config.json with the file's folder."""
    file = checkpoint.files.locate("config.json")
    try:
        yield
    except ConfigFieldError as error:
        raise ConfigurationError(f"{file}: {error.problem}") from error
    except (RuntimeError, ValueError, ArithmeticError, MemoryError) as error:
        # Of torch for sizes that overflow, and of functions of extreme numbers.
        raise ConfigurationError(f"{file}: the model cannot be made: {one_line(error)}") from error
