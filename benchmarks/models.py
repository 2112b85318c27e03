"""Models to measure: random weights of a known shape, made when needed."""

import math
import shutil
from pathlib import Path

import torch
from safetensors import safe_open

from baton.demo import demo_model_path

__all__ = ["make_random_llama", "num_weights"]


def make_random_llama(folder: Path) -> Path:
    """Writes a bfloat16 Llama of about 100M random weights; returns its folder.

    768 wide, 12 layers, 12 query and 4 key-value heads, 16,384 tokens. It
    borrows the demo model's tokenizer, whose ids are among its own.
    """
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16_384,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_model_path() / name, folder / name)
    return folder


def num_weights(folder: Path) -> int:
    """Numbers in a checkpoint's weights."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no iterator
    return total
