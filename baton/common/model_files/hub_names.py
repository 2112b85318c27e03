"""Names of models on the Hugging Face Hub, with a revision: `org/model@v1.0`. Pure.

The revision is part of the name, so that workers, router and tokenizer read the same files
wherever the name goes. Files on disk need none.
"""

from dataclasses import dataclass
from pathlib import Path

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag
from baton.common.model_files.named_models import NAMED_MODELS

__all__ = ["HubFlags", "split_revision", "with_revision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFlags:
    """Flags of where a model's files come from."""

    revision: str | None = flag(
        None,
        "branch, tag or commit of a model on the Hub, equal on all servers; --model org/model@v1.0 "
        "means the same (default: main)",
        metavar="NAME",
    )


def with_revision(model: str, revision: str | None) -> str:
    """Returns the name of a model in a revision; the model's own name if `revision` is None.

    Raises:
        ConfigurationError: the model is a path, or names another revision.
    """
    if revision is None:
        return model
    _, named = split_revision(model)
    if model in NAMED_MODELS or Path(model).expanduser().exists():
        kind = "a model of this machine" if model in NAMED_MODELS else "a path"
        raise ConfigurationError(
            f"--revision is {revision!r}; {model} is not on the Hub but {kind}"
        )
    if named not in (None, revision):
        raise ConfigurationError(f"--revision is {revision!r}; --model names revision {named!r}")
    return model if named else f"{model}@{revision}"


def split_revision(name: str) -> tuple[str, str | None]:
    """Returns the name of a Hub model without its revision, and the revision."""
    repository, _, revision = name.partition("@")
    return repository, revision or None
