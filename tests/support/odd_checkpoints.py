"""Changes of tiny checkpoints into the odd forms that published ones have.

A `Change` takes a checkpoint's folder. `odd_checkpoint(variant, change)` makes a changed copy.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import VOCAB_SIZE, tiny_checkpoint

__all__ = [
    "ABSENT",
    "EMBEDDINGS",
    "INDEX",
    "WEIGHTS",
    "Change",
    "Tensors",
    "adding",
    "both",
    "config",
    "config_text",
    "leftover_index",
    "odd_checkpoint",
    "other_head",
    "renamed",
    "rope_scaling",
    "shards",
    "weights",
    "without_embedding",
]

Change = Callable[[Path], None]
Tensors = dict[str, torch.Tensor]

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
ABSENT = object()
"""Stands for a field that config.json does not have."""
EMBEDDINGS = {
    "llama_tied_biased": "model.embed_tokens.weight",
    "qwen2": "model.embed_tokens.weight",
    "qwen3": "model.embed_tokens.weight",
    "opt": "model.decoder.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
}
"""Variants with tied embeddings, and the embedding's name."""


def odd_checkpoint(variant: str, change: Change, parent: Path | None = None) -> Path:
    """Returns the folder of a changed copy of a variant's checkpoint.

    Args:
        variant: of `tests.support.checkpoints`.
        change: the change.
        parent: where to make the folder; None for one of the machine's.
    """
    folder = Path(tempfile.mkdtemp(prefix="odd-checkpoint-", dir=parent))
    shutil.copytree(tiny_checkpoint(variant), folder, dirs_exist_ok=True)
    change(folder)
    return folder


def both(*changes: Change) -> Change:
    """Makes several changes."""

    def change(folder: Path) -> None:
        for edit in changes:
            edit(folder)

    return change


def config(**fields: Any) -> Change:
    """Changes fields of config.json, or removes those that are `ABSENT`."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text()) | fields
        kept = {name: value for name, value in content.items() if value is not ABSENT}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def rope_scaling(**parameters: Any) -> dict[str, Any]:
    """Fields of config.json that state a scaling where older checkpoints do."""
    return {"rope_parameters": ABSENT, "rope_scaling": parameters}


def config_text(make: Callable[[bytes], bytes]) -> Change:
    """Changes the bytes of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_bytes(make(file.read_bytes()))

    return change


def weights(make: Callable[[Tensors], Tensors]) -> Change:
    """Changes the tensors."""

    def change(folder: Path) -> None:
        tensors = make(load_file(folder / WEIGHTS))
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def adding(tensors: Tensors) -> Change:
    """Adds tensors, or replaces them."""
    return weights(lambda stored: stored | tensors)


def renamed(rename: Callable[[str], str]) -> Change:
    """Changes the tensors' names."""
    return weights(lambda stored: {rename(name): tensor for name, tensor in stored.items()})


def other_head(num_rows: int = VOCAB_SIZE) -> Change:
    """Adds an output head that is not the embedding."""
    generator = torch.Generator().manual_seed(3)
    return adding({"lm_head.weight": torch.randn(num_rows, 64, generator=generator) * 0.15})


def without_embedding(embedding: str) -> Change:
    """Stores the weights of embedding and output head under the head's name alone."""
    return renamed(lambda name: "lm_head.weight" if name == embedding else name)


def leftover_index(*, has_shard: bool) -> Change:
    """Adds an index, beside the single file, with other weights."""

    def change(folder: Path) -> None:
        tensors = {name: tensor * 0.5 for name, tensor in load_file(folder / WEIGHTS).items()}
        if has_shard:
            save_file(tensors, folder / "old.safetensors", metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "old.safetensors")}
        (folder / INDEX).write_text(json.dumps(index))

    return change


def shards(make: Callable[[Tensors, Tensors, dict[str, Any]], None]) -> Change:
    """Divides the weights into two files, a.safetensors and b.safetensors, with an index.

    Args:
        make: changes the tensors of both and the index's `weight_map`.
    """

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        names = sorted(tensors)
        first = {name: tensors[name] for name in names[::2]}
        second = {name: tensors[name] for name in names[1::2]}
        weight_map: dict[str, Any] = dict.fromkeys(first, "a.safetensors")
        weight_map |= dict.fromkeys(second, "b.safetensors")
        make(first, second, weight_map)
        save_file(first, folder / "a.safetensors", metadata={"format": "pt"})
        save_file(second, folder / "b.safetensors", metadata={"format": "pt"})
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return change
