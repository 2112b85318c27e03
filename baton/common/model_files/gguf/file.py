"""`GgufFile`: a model in one file, with the interface of a checkpoint folder."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from baton.common.errors import ConfigurationError
from baton.common.model_files.gguf.config import config_json, generation_config_json
from baton.common.model_files.gguf.header import GgufHeader, read_header
from baton.common.model_files.gguf.tokenizer import build_tokenizer, tokenizer_config_json

__all__ = ["GgufFile"]

_T = TypeVar("_T")
_READERS = {
    "config.json": config_json,
    "generation_config.json": generation_config_json,
}


@dataclass(frozen=True)
class GgufFile:
    """A model in one GGUF file.

    Attributes:
        path: the file.
    """

    path: Path

    @cached_property
    def header(self) -> GgufHeader:
        """Its metadata and the list of its tensors.

        Raises:
            ConfigurationError: the file cannot be read or is no GGUF file.
        """
        return read_header(self.path)

    def locate(self, _name: str) -> Path:
        """Returns the file, which replaces all files of a checkpoint folder."""
        return self.path

    def read_json(self, name: str) -> dict[str, Any]:
        """Returns the contents that a JSON file of the model's checkpoint folder would have.

        Args:
            name: of the file in the folder; those that a GGUF file does not replace are empty.

        Raises:
            ConfigurationError: the file has no model that is supported; names the key.
        """
        reader = _READERS.get(name)
        return self._read(reader) if reader else {}

    def read_settings(self) -> dict[str, Any]:
        """Returns special tokens and chat templates under tokenizer_config.json's names.

        Raises:
            ConfigurationError: the metadata is malformed.
        """
        return self._read(tokenizer_config_json)

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        """Builds the tokenizer.

        Raises:
            ConfigurationError: its kind is not supported; names the key.
        """
        return self._read(build_tokenizer)

    def eos_token_id(self) -> int | None:
        """Returns the id of the tokenizer's end-of-sequence token; None if it has none."""
        return self.header.token_id("eos")

    def tokenizer_digest(self) -> str:
        """Returns nothing: the vocabulary may differ from its checkpoint folder's in padding."""
        return ""

    def _read(self, reader: Callable[[GgufHeader], _T]) -> _T:
        """Calls a reader of the header.

        Raises:
            ConfigurationError: the reader's, or the metadata has values of unexpected types.
        """
        header = self.header
        try:
            return reader(header)
        except ConfigurationError:
            raise
        except Exception as error:  # `tokenizers` raises plain Exception
            raise header.refuse(f"its metadata is malformed: {error!r}") from error
