"""Models of random weights that benchmarks make, and the flags that choose a model."""

import argparse
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.common.model_files.named_models import demo_model_path
from engine.cli_args import add_engine_args, engine_config_from_args
from engine.config import EngineConfig

__all__ = [
    "RANDOM_MODELS",
    "add_offline_args",
    "cached_random_model",
    "make_random_model",
    "offline_config",
    "resolve_model",
    "write_dummy_model",
    "write_random_config",
]

_MODELS_FOLDER = Path("~/.cache/baton-bench")
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
_LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
_LLAMA_1B: dict[str, Any] = _LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}
# About 0.5B weights, of which a token uses 60M.
_QWEN3_MOE: dict[str, Any] = _LLAMA | {
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}
# One layer in four has attention; the others have the states of 8 heads of 128 x 128.
_QWEN3_5: dict[str, Any] = _LLAMA | {
    "intermediate_size": 2048,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32_768,
}
RANDOM_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-100m": ("llama", _LLAMA | {"intermediate_size": 2048}),
    "llama-120m": ("llama", _LLAMA | {"intermediate_size": 2816}),
    "llama-120m-32k": (
        "llama",
        _LLAMA | {"intermediate_size": 2816, "max_position_embeddings": 32_768},
    ),
    "qwen2-0.5b": ("qwen2", _QWEN2),
    "qwen3-0.6b": ("qwen3", _QWEN3),
    "qwen3-moe-0.5b": ("qwen3_moe", _QWEN3_MOE),
    "qwen3.5-120m": ("qwen3_5_text", _QWEN3_5),
    "llama-3.2-1b": ("llama", _LLAMA_1B),
    "llama-3.1-8b": ("llama", _LLAMA_8B),
}
"""By name: the `model_type` and the shape. The shape of qwen2-0.5b is the real one's except for a
smaller vocabulary. That of llama-3.1-8b is for --load-format dummy, which needs no 16 GB on
disk."""


def make_random_model(name: str, folder: Path, device: str = "cpu") -> Path:
    """Writes one of `RANDOM_MODELS` in bfloat16; returns its folder.

    It has the demo model's tokenizer, which uses a part of its vocabulary.

    Args:
        name: of the model.
        folder: is made.
        device: draws the weights; a GPU draws others than a CPU, and those of a billion in seconds.
    """
    import torch
    import transformers

    model_type, shape = RANDOM_MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **shape, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    _copy_tokenizer(folder)
    return folder


def write_dummy_model(config: Mapping[str, Any], folder: Path) -> Path:
    """Writes a model without weights, for `--load-format dummy`; returns its folder.

    Args:
        config: the fields of its config.json.
        folder: is made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    _copy_tokenizer(folder)
    return folder


def write_random_config(name: str, folder: Path) -> Path:
    """Writes one of `RANDOM_MODELS` without weights; returns its folder."""
    model_type, shape = RANDOM_MODELS[name]
    return write_dummy_model(shape | {"model_type": model_type, "dtype": "bfloat16"}, folder)


def cached_random_model(name: str, root: Path | None = None, device: str = "cpu") -> Path:
    """Returns a random model's folder, and makes it if it does not exist.

    The folder's name has a digest of the shape.

    Args:
        name: of the model.
        root: the folder is below it; None for the folder of all benchmarks.
        device: as in `make_random_model`.
    """
    root = _MODELS_FOLDER.expanduser() if root is None else root
    digest = hashlib.sha256(json.dumps(RANDOM_MODELS[name]).encode()).hexdigest()
    folder = root / f"{name}-{digest[:8]}"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as unfinished:
            # Renamed when complete: an interrupted run leaves no partial model.
            make_random_model(name, Path(unfinished) / name, device).rename(folder)
    return folder


def add_offline_args(parser: argparse.ArgumentParser) -> None:
    """Adds `--model` and the engine's flags."""
    add_model_arg(parser)
    add_engine_args(parser, omit=("model", "served_model_name", "kv_connector"))


def add_model_arg(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`."""
    parser.add_argument(
        "--model",
        help="checkpoint folder or Hugging Face Hub name, or random weights made when needed: "
        f"{', '.join(RANDOM_MODELS)} (default: the demo model)",
    )


def offline_config(args: argparse.Namespace) -> EngineConfig:
    """Returns the config that parsed flags describe, for an engine of role "both".

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """
    return engine_config_from_args(args, model=resolve_model(args.model, args.load_format))


def resolve_model(model: str | None, load_format: str = "auto") -> str:
    """Returns the checkpoint folder or Hub name that `--model` means; makes random models, without
    weights if the format is "dummy".
    """
    if model is None:
        return str(demo_model_path())
    if model not in RANDOM_MODELS:
        return model
    folder = _MODELS_FOLDER.expanduser()
    if load_format == "dummy":
        return str(write_random_config(model, folder / f"{model}-dummy"))
    return str(cached_random_model(model))


def _copy_tokenizer(folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_model_path() / file, folder / file)
