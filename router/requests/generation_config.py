"""The sampling defaults that a checkpoint states in `generation_config.json`."""

from typing import Any

from baton.common.errors import ConfigurationError, InvalidArgumentError
from baton.common.model_files.files import open_model_files
from baton.common.model_files.named_models import RECOMMENDED_PARAMS
from baton.common.request.sampling_params import MODEL_DEFAULTS, PARAM_TYPES, SamplingParams
from router.config.served_model import GENERATION_CONFIGS

__all__ = ["load_default_params"]

_FILE = "generation_config.json"
_OTHER_NAMES = {"max_tokens": "max_new_tokens"}
"""Names of the file's entries that are not those of the fields of `SamplingParams`."""
_FILE_ERRORS = (
    InvalidArgumentError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


def load_default_params(model: str, generation_config: str) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that the checkpoint states, with their values.

    Args:
        model: checkpoint folder, GGUF file, named model or Hub name.
        generation_config: "auto", or "none", for which no field is returned.

    Raises:
        ConfigurationError: `generation_config` is another word, the file cannot be read or is
            not a JSON object, or an entry has a value of a wrong type or out of range; names
            the file and the entry.
    """
    if generation_config not in GENERATION_CONFIGS:
        raise ConfigurationError(
            f"--generation-config is {generation_config!r}; "
            f"it must be one of {', '.join(GENERATION_CONFIGS)}"
        )
    if generation_config == "none":
        return {}
    files = open_model_files(model)
    path = files.locate(_FILE)
    entry = ""
    defaults = {}
    try:
        stated = {**RECOMMENDED_PARAMS.get(model, {}), **files.read_json(_FILE)}
        for field in MODEL_DEFAULTS:
            entry = _OTHER_NAMES.get(field, field)
            if stated.get(entry) is not None:
                defaults[field] = _checked(field, stated[entry])
    except _FILE_ERRORS as error:
        reason = error.message if isinstance(error, InvalidArgumentError) else error
        where = f"{path}, {entry}" if entry else path
        raise ConfigurationError(
            f"{where}: {reason}; correct the file or set --generation-config none"
        ) from error
    return defaults


def _checked(field: str, value: Any) -> Any:
    """Returns the value of a field, as an int if the field has integers.

    Raises:
        InvalidArgumentError: the value is no number, no integer, or out of range.
        OverflowError: the value is too large.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgumentError.for_field(field, value, "a number")
    if PARAM_TYPES[field] == int | None:
        if int(value) != value:
            raise InvalidArgumentError.for_field(field, value, "an integer")
        value = int(value)
    return getattr(SamplingParams(**{field: value}), field)
