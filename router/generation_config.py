"""The sampling defaults that a checkpoint states in `generation_config.json`."""

from typing import Any

from baton.errors import ConfigurationError, InvalidArgumentError
from baton.sampling_params import SamplingParams
from router.config import GENERATION_CONFIGS
from router.tokenizer import read_json, resolve_folder

__all__ = ["load_default_params"]

_FILE = "generation_config.json"
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The entries of the file that are used, as in vLLM, with their fields of `SamplingParams`."""


def load_default_params(model: str, generation_config: str) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that the checkpoint states, with their values.

    Args:
        model: checkpoint folder or Hub name.
        generation_config: "auto", or "none", for which no field is returned.

    Raises:
        ConfigurationError: `generation_config` is another word, or the file is not a JSON
            object or has a value that is out of range.
    """
    if generation_config not in GENERATION_CONFIGS:
        raise ConfigurationError(
            f"--generation-config is {generation_config!r}; "
            f"it must be one of {', '.join(GENERATION_CONFIGS)}"
        )
    if generation_config == "none":
        return {}
    path = resolve_folder(model) / _FILE
    try:
        stated = read_json(path)
        found = {ours: stated[theirs] for theirs, ours in _FIELDS.items() if theirs in stated}
        defaults = {name: value for name, value in found.items() if value is not None}
        SamplingParams(**defaults)
    except (InvalidArgumentError, ValueError, TypeError) as error:
        reason = error.message if isinstance(error, InvalidArgumentError) else error
        raise ConfigurationError(
            f"{path}: {reason}; correct the file or set --generation-config none"
        ) from error
    return defaults
