"""The files of a model: a checkpoint folder or one GGUF file, behind one interface.

Everything that is read of a model besides its weights goes through `ModelFiles`, so that only
`local_model` distinguishes the two. Weights: `engine.runtime.weights.loader`. A leaf module without
torch that router and workers share.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from typing_extensions import override

from baton.common.errors import ConfigurationError
from baton.common.file_access import find_files, has_file, read_text, unreadable
from baton.common.model_files.gguf import GgufFile
from baton.common.model_files.named_models import NAMED_MODELS
from baton.common.model_files.tokenizer_files import (
    eos_token_id,
    load_tokenizer,
    resolve_folder,
    vocabulary_digest,
)
from baton.common.model_files.tokenizer_settings import read_json, read_settings

__all__ = [
    "CheckpointFolder",
    "ModelFiles",
    "local_model",
    "open_model_files",
]


class ModelFiles(Protocol):
    """The files that describe a model."""

    @property
    def path(self) -> Path:
        """The folder or the file."""

    def locate(self, name: str) -> Path:
        """Returns the file that `read_json(name)` reads, which may not exist."""

    def read_json(self, name: str) -> dict[str, Any]:
        """Returns the object in a JSON file of a checkpoint folder; empty if there is none.

        Args:
            name: such as config.json or generation_config.json; a GGUF file has what is in
                these two under its own keys.

        Raises:
            TypeError, ValueError: the file has something else.
            ConfigurationError: the file is there and cannot be read, or a GGUF file's model is not
                supported.
        """

    def read_settings(self) -> dict[str, Any]:
        """Returns special tokens and chat templates, as tokenizer_config.json has them.

        Raises:
            TypeError, ValueError: a file has something else.
            ConfigurationError: a file is there and cannot be read, or a GGUF file's metadata is
                malformed.
        """

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        """Loads the tokenizer, with truncation and padding turned off.

        Raises:
            ConfigurationError: it is missing, broken or of an unsupported kind.
        """

    def eos_token_id(self) -> int | None:
        """Returns the id of the tokenizer's own end-of-sequence token; None if it names none, or is
        malformed.

        Raises:
            ConfigurationError: a file is there and cannot be read.
        """

    def tokenizer_digest(self) -> str:
        """Returns a digest of the tokenizer's vocabulary; empty if there is none to compare, as
        of a GGUF file, which may fill its vocabulary up.

        Raises:
            ConfigurationError: a file is there and cannot be read.
        """


@dataclass(frozen=True, slots=True)
class CheckpointFolder(ModelFiles):
    """A model in a folder: config.json, safetensors, tokenizer files.

    Attributes:
        path: the folder.
    """

    path: Path

    @override
    def locate(self, name: str) -> Path:
        return self.path / name

    @override
    def read_json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name)

    @override
    def read_settings(self) -> dict[str, Any]:
        return read_settings(self.path)

    @override
    def load_tokenizer(self) -> tokenizers.Tokenizer:
        return load_tokenizer(self.path)

    @override
    def eos_token_id(self) -> int | None:
        return eos_token_id(self.path)

    @override
    def tokenizer_digest(self) -> str:
        return vocabulary_digest(self.path)


def local_model(path_or_name: str | Path) -> ModelFiles | None:
    """Returns the files of a model on this machine; None for any other name.

    A path that exists comes before a named model (`baton.common.model_files.named_models`). A
    folder of the Hub's cache stands for its snapshot.

    Raises:
        ConfigurationError: a named model is not installed, there is no such GGUF file, or the
            path leads to something that cannot be read.
    """
    try:
        path = Path(path_or_name).expanduser()
        exists = path.exists()
        if not exists and path.is_symlink():
            path.stat()
    except (FileNotFoundError, PermissionError) as error:
        raise unreadable(path, error) from error
    except (OSError, RuntimeError) as error:  # no such user, no permission, too long a name
        raise ConfigurationError(f"cannot look up {str(path_or_name)!r}: {error}") from error
    if not exists and str(path_or_name) in NAMED_MODELS:
        path = NAMED_MODELS[str(path_or_name)]()
    if path.is_dir():
        return CheckpointFolder(_snapshot(path) or path)
    if path.is_file():
        return GgufFile(path)
    if path.suffix == ".gguf":
        raise ConfigurationError(f"there is no file {path_or_name}")
    return None


def _snapshot(folder: Path) -> Path | None:
    """Returns the snapshot in a folder `models--ORG--NAME` of the Hub's cache; None for others.

    Raises:
        ConfigurationError: it has several, and none of them is that of the main branch.
    """
    snapshots = find_files(folder / "snapshots", "*")
    if not snapshots or has_file(folder / "config.json"):
        return None
    main = folder / "snapshots" / (read_text(folder / "refs" / "main") or "").strip()
    if main in snapshots:
        return main
    if len(snapshots) > 1:
        names = ", ".join(snapshot.name for snapshot in snapshots)
        raise ConfigurationError(f"{folder} has several snapshots; name the folder of one: {names}")
    return snapshots[0]


def open_model_files(path_or_name: str | Path) -> ModelFiles:
    """Finds a model's files; downloads those of a Hub repository, without its weights.

    Args:
        path_or_name: a checkpoint folder, a GGUF file, a named model or a Hub name.

    Raises:
        ConfigurationError: there is no such model.
    """
    return local_model(path_or_name) or CheckpointFolder(resolve_folder(path_or_name))
