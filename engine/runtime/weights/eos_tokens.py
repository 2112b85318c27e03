"""The end-of-sequence ids of a checkpoint."""

import logging
from typing import Any

from baton.common.errors import ConfigurationError
from engine.runtime.weights.checkpoint import Checkpoint

__all__ = ["read_eos_token_ids"]

_GENERATION_CONFIG = "generation_config.json"
_CONFIG = "config.json"
_FIELD = "eos_token_id"
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
    for name, fields in ((_GENERATION_CONFIG, generation), (_CONFIG, checkpoint.config)):
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
