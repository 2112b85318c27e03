"""Models to measure: random weights of a known shape, made when needed."""

import hashlib
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from baton.demo import demo_model_path

__all__ = [
    "RANDOM_MODELS",
    "cached_random_model",
    "make_random_model",
    "num_weights",
    "read_config",
]

_LLAMA: dict[str, Any] = {
    "vocab_size": 16_384,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_QWEN2: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
RANDOM_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-100m": ("Llama", _LLAMA | {"intermediate_size": 2048}),
    "llama-120m": ("Llama", _LLAMA | {"intermediate_size": 2816}),
    "qwen2-0.5b": ("Qwen2", _QWEN2),
}
"""By name: the family, and its shape. Qwen2 has the 0.5B's, but for a smaller vocabulary."""


def make_random_model(name: str, folder: Path) -> Path:
    """Writes one of `RANDOM_MODELS` in bfloat16; returns its folder.

    It borrows the demo model's tokenizer, whose ids are among its own.
    """
    import transformers

    family, shape = RANDOM_MODELS[name]
    config = getattr(transformers, f"{family}Config")(**shape, dtype=torch.bfloat16)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_model_path() / file, folder / file)
    return folder


def cached_random_model(name: str, root: Path) -> Path:
    """The model's folder below `root`, made if it is not there. A new shape makes a new one."""
    digest = hashlib.sha256(json.dumps(RANDOM_MODELS[name]).encode()).hexdigest()
    folder = root / f"{name}-{digest[:8]}"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as unfinished:
            # Renamed when whole: an interrupted run leaves no half of a model.
            make_random_model(name, Path(unfinished) / name).rename(folder)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def num_weights(folder: Path) -> int:
    """Numbers in a checkpoint's weights."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no iterator
    return total
