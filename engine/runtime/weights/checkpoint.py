"""`Checkpoint`: finds and checks a model's files on disk, and computes its fingerprint.

This module reads JSON files and file names, and all bytes for the fingerprint. It loads no
weights.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from baton.common.errors import ConfigurationError
from baton.common.file_access import find_files, has_file, missing_files_error, unreadable
from baton.common.model_files.files import CheckpointFolder, ModelFiles, local_model
from baton.common.model_files.gguf import GgufFile
from baton.common.model_files.named_models import split_revision

__all__ = ["Checkpoint", "one_line", "open_checkpoint"]

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HUB_WEIGHTS = "*.safetensors"
_HUB_PATTERNS = ("*.json", "*.txt", "tokenizer.model")

_MAX_REASON_LENGTH = 300

_HASH_PART_BYTES = 64 * 2**20
_HASH_READ_BYTES = 2**20
_HASH_THREADS = 4


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder or a GGUF file.

    Attributes:
        files: the files besides the weights.
        config: content of config.json.
        weight_files: its existing safetensors files, sorted by name, or the GGUF file or files;
            empty if it was opened without weights.
    """

    files: ModelFiles
    config: dict[str, Any]
    weight_files: tuple[Path, ...]

    def read_json(self, name: str) -> dict[str, Any]:
        """Returns the object in one of its JSON files; empty if there is no such file.

        Raises:
            ConfigurationError: the file cannot be read, or is not a JSON object; names it.
        """
        return _read_json(self.files, name)

    def fingerprint(self) -> bytes:
        """Returns a digest of config.json and of every weight file's name and bytes.

        The digest of a GGUF file is that of its bytes, which contain its config.

        The digest is XXH3-128 over the digests of parts of fixed size, which threads
        compute. It distinguishes checkpoints, but is not cryptographic: it does not
        detect a forged one.

        Raises:
            ConfigurationError: a file cannot be read.
        """
        is_one_file = self.files.path.is_file()
        files = dict.fromkeys((self.files.locate(_CONFIG), *self.weight_files))
        parts = [part for file in files for part in _parts(file)]
        digest = xxhash.xxh3_128()
        with ThreadPoolExecutor(_HASH_THREADS) as threads:
            for (file, start), part in zip(parts, threads.map(_hash_part, parts), strict=True):
                name = file.suffix if is_one_file else file.name
                digest.update(f"{name}\0{start}\0".encode() + part)
        return bytes(digest.digest())


def open_checkpoint(
    path_or_name: str, *, with_weights: bool = True, other_weights: Sequence[str] = ()
) -> Checkpoint:
    """Finds a model's files, or downloads them from the Hugging Face Hub.

    Args:
        path_or_name: a checkpoint folder, a GGUF file, a named model, or a Hub name such as
            `org/model`.
        with_weights: whether to find or download the weights too; False if only config.json
            is needed.
        other_weights: names of files of weights that are taken in place of safetensors ones if
            there are none.

    Raises:
        ConfigurationError: there is no such model, a file is missing or not JSON, the weights
            are not safetensors, or a GGUF file has an unsupported model.
    """
    patterns = (*_HUB_PATTERNS, _HUB_WEIGHTS, *other_weights) if with_weights else _HUB_PATTERNS
    files = local_model(path_or_name) or _download_files(path_or_name, patterns)
    if isinstance(files, CheckpointFolder) and not has_file(files.locate(_CONFIG)):
        raise missing_files_error(files.path, f"is not a checkpoint folder: it has no {_CONFIG}")
    weight_files = _find_weights(files, other_weights) if with_weights else ()
    return Checkpoint(files, _read_json(files, _CONFIG), weight_files)


def _download_files(name: str, patterns: Sequence[str]) -> CheckpointFolder:
    if name.startswith((".", "/", "~")) or split_revision(name)[0].count("/") > 1:
        raise ConfigurationError(f"{name} is not a folder")
    return CheckpointFolder(_download(name, patterns))


def _download(name: str, patterns: Sequence[str]) -> Path:
    """Downloads a Hub model unless it is cached; returns its folder in the local cache.

    If the Hub cannot be reached, a cached copy is used.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        repository, revision = split_revision(name)
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        reason = "the Hub cannot be reached and the model is not in the local cache"
        raise _no_model(name, reason) from error
    except Exception as error:  # its HTTP library's errors have no common base
        raise _no_model(name, one_line(error)) from error


def _no_model(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} is not a folder here, and not available from the Hugging Face Hub: {reason}"
    )


def _find_weights(files: ModelFiles, others: Sequence[str]) -> tuple[Path, ...]:
    if isinstance(files, GgufFile):
        return files.header.parts
    folder = files.path
    if has_file(folder / _WEIGHTS):  # an index beside it is left over from before
        return (folder / _WEIGHTS,)
    if has_file(folder / _INDEX):
        return tuple(_shards(folder))
    for name in others:
        if has_file(folder / name):
            return (folder / name,)
    if find_files(folder, "*.bin"):
        raise ConfigurationError(
            f"{folder} has weights as .bin files only; convert them to safetensors "
            f"(in transformers: model.save_pretrained)"
        )
    raise ConfigurationError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}")


def _shards(folder: Path) -> Iterator[Path]:
    weight_map = _read_json(CheckpointFolder(folder), _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigurationError(f"{folder / _INDEX} has no weight_map")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigurationError(f"{folder / _INDEX}: weight_map must have names of files")
    for name in sorted(set(weight_map.values())):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigurationError(f"{folder / _INDEX}: {name!r} is no file of the folder")
        if not has_file(folder / name):
            shown = repr(name[:_MAX_REASON_LENGTH])
            raise ConfigurationError(f"{folder} does not contain {shown}, which {_INDEX} lists")
        yield folder / name


def _read_json(files: ModelFiles, name: str) -> dict[str, Any]:
    try:
        return files.read_json(name)
    except TypeError as error:
        raise ConfigurationError(f"{files.locate(name)} does not contain a JSON object") from error
    except (RecursionError, ValueError) as error:
        reason = f"{files.locate(name)} is not readable JSON: {one_line(error)}"
        raise ConfigurationError(reason) from error


def one_line(error: Exception) -> str:
    """Returns the error's text on one line, cut to fit at the end of a message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON_LENGTH else f"{text[:_MAX_REASON_LENGTH]}..."


def _parts(file: Path) -> Iterator[tuple[Path, int]]:
    """Yields (file, start) of each part of the file."""
    try:
        num_bytes = file.stat().st_size
    except OSError as error:
        raise unreadable(file, error) from error
    for start in range(0, max(1, num_bytes), _HASH_PART_BYTES):
        yield file, start


def _hash_part(part: tuple[Path, int]) -> bytes:
    file, start = part
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_HASH_READ_BYTES))
    try:
        with file.open("rb", buffering=0) as source:
            source.seek(start)
            left = _HASH_PART_BYTES
            while left and (num_read := source.readinto(buffer[:left])):
                digest.update(buffer[:num_read])
                left -= num_read
    except OSError as error:
        raise unreadable(file, error) from error
    return bytes(digest.digest())
