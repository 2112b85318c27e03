"""Gemma 3 270M for tests: texts, their tokens, and what `transformers` computes of them."""

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from baton.common.errors import ConfigurationError
from baton.common.model_files.files import open_model_files
from baton.common.model_files.gguf import GgufFile
from baton.common.model_files.named_models import gemma3_path

MODEL = "gemma3-270m"
WINDOW = 512
# Longer than a window, so that the layers with one do not see the beginning.
PREFIX = (Path(__file__).parents[2] / "LICENSE").read_text()[:3300]
LONG_TEXTS = tuple(
    PREFIX + ending
    for ending in (
        "\n\nIn plain words, this license says that",
        "\n\nQ: May I sell software under this license?\nA:",
        '\n\n{"name": "Apache License", "version":',
        "\n\nZusammengefasst auf Deutsch:",
        "",
        "\n\n1. A list of all definitions:\n- License:",
    )
)
TEXTS = (
    "The capital of France is",
    "Once upon a time, there was a fox who",
    "def fibonacci(n):\n    ",
    "日本の首都は",
    "Photosynthesis is the process by which",
    "La révolution française a commencé en",
    "SELECT name, age FROM users WHERE",
    "The three laws of motion are:\n1.",
    "Im Jahr 1969 landete",
    "Roses are red, violets are blue,\n",
    "<html>\n<head>\n<title>",
    "To make pancakes you need",
    "2, 4, 8, 16, 32,",
    "Новости дня:",
    *LONG_TEXTS,
)


def is_installed() -> bool:
    try:
        return gemma3_path().is_file()
    except ConfigurationError:
        return False


@cache
def tokenizer() -> Any:
    return open_model_files(MODEL).load_tokenizer()


def prompt(text: str) -> tuple[int, ...]:
    """The tokens of a text, after the one that begins all texts."""
    return tuple(tokenizer().encode(text).ids)


def stored_tensors() -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields names, types and numbers of the file's tensors, dequantized by the `gguf` package."""
    file = open_model_files(MODEL)
    assert isinstance(file, GgufFile)
    data = np.memmap(file.path, mode="r")
    for name, tensor in file.header.tensors.items():
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        num_rows, num_columns = prod(tensor.shape[:-1]), tensor.shape[-1]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = num_columns // block * block_bytes
        stored = data[tensor.offset :][: num_rows * row_bytes].reshape(num_rows, row_bytes)
        rows = [
            gguf.dequantize(part.reshape(1, -1), kind).reshape(len(part), num_columns)
            for part in np.array_split(stored, -(-num_rows // 512))
        ]
        yield name, kind.name, torch.from_numpy(np.concatenate(rows)).view(tensor.shape)


@cache
def reference_model() -> Any:
    """The model in float32, with the config that its authors published."""
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        max_position_embeddings=32768,
        sliding_window=WINDOW,
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    tensors = {name: numbers for name, _, numbers in stored_tensors()}
    for name, parameter in model.named_parameters():  # the output head is the embedding
        numbers = tensors.pop(names.get_name(name, (".weight",)))
        parameter.data = numbers - 1 if name.endswith("norm.weight") else numbers
    assert not tensors
    return model


def reference_tokens(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """The likeliest tokens after each of the last `num_tokens` beginnings of `tokens`."""
    with torch.inference_mode():
        output = reference_model()(torch.tensor([tokens]), logits_to_keep=num_tokens + 1)
    found: list[int] = output.logits[0, :-1].argmax(-1).tolist()
    return found
