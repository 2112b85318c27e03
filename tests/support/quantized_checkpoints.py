"""Tiny GGUF files whose tensors have different formats, as files that people run have.

Rows are whole blocks of all formats. Formats that the `gguf` package cannot write get random
blocks; the numbers of all files have about the deviation of a trained model's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kernels.formats import FORMATS, GGML_FORMATS
from tests.support.gguf_families import family_contents, family_model
from tests.support.gguf_files import stored_array, write_gguf

GGML_KINDS = {each.name: gguf.GGMLQuantizationType(kind) for kind, each in GGML_FORMATS.items()}
"""By the names of formats, the types of GGUF files."""

# As llama.cpp mixes formats, by the name of a tensor without its layer; "" is that of the others.
# Gemma's Q and K have another format than V, llama's gates another one than the up projections.
MIXTURES: Mapping[str, Mapping[str, str]] = {
    "llama": {
        "": "Q4_K",
        "token_embd": "Q5_1",
        "output": "Q6_K",
        "attn_v": "Q6_K",
        "ffn_up": "Q5_K",
        "ffn_down": "Q4_1",
    },
    "gemma3": {
        "": "Q5_0",
        "token_embd": "Q8_0",
        "attn_v": "Q8_0",
        "attn_output": "Q4_K",
        "ffn_down": "Q6_K",
    },
    "qwen3_moe": {
        "": "Q4_0",
        "token_embd": "Q4_K",
        "output": "Q6_K",
        "ffn_gate_inp": "F32",
        "ffn_gate_exps": "Q4_K",
        "ffn_up_exps": "Q4_K",
        "ffn_down_exps": "MXFP4",
    },
}
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
_SIZES_OF: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"num_hidden_layers": 6, "query_pre_attn_scalar": 32},
    "qwen3_moe": {"moe_intermediate_size": 256},
}
# Places of a block's factors (float16), and the factor's share of the deviation of its numbers.
# The random minimums of Q4_K and Q5_K are as large as the means of what they are subtracted from.
_FACTORS: Mapping[str, Mapping[int, float]] = {
    "Q4_K": {0: 1 / 250, 2: 7.5 / 250},
    "Q5_K": {0: 1 / 500, 2: 15.5 / 500},
    "Q6_K": {208: 1 / 1370},
}


def quantized_model(name: str) -> Any:
    """Returns the model of `transformers` that `save_quantized` writes, before it is rounded."""
    return family_model(name, **{**_SIZES, **_SIZES_OF.get(name, {})})


def save_quantized(path: Path, name: str, formats: str | Mapping[str, str] = "") -> Path:
    """Writes a model.

    Args:
        path: of the file.
        name: one of `MIXTURES`.
        formats: of all matrices, or by the name of a tensor as in `MIXTURES`; empty for these.
    """
    by_part = {"": formats} if isinstance(formats, str) and formats else formats or MIXTURES[name]
    assert isinstance(by_part, Mapping)
    metadata, tensors = family_contents(quantized_model(name))
    stored = {
        tensor: stored_tensor(array, _format_of(tensor, by_part), seed=seed)
        for seed, (tensor, (array, _)) in enumerate(tensors.items())
    }
    return write_gguf(path, metadata, stored)


def stored_tensor(array: np.ndarray, name: str, *, seed: int) -> tuple[np.ndarray, int | None]:
    """Returns a tensor as a file stores it in a format; vectors are float32."""
    if array.ndim == 1 or name == "F32":
        return array, None
    if name in _FACTORS:
        rows = int(np.prod(array.shape[:-1]))
        blocks = random_blocks(name, rows, array.shape[-1], seed=seed, deviation=array.std())
        return blocks.reshape(*array.shape[:-1], -1), GGML_KINDS[name]
    return stored_array(array, GGML_KINDS[name])


def random_blocks(
    name: str, num_rows: int, num_columns: int, *, seed: int, deviation: float
) -> np.ndarray:
    """Returns random rows in Q4_K, Q5_K or Q6_K, `[num_rows, bytes]` uint8.

    Args:
        name: of the format.
        num_rows: number of rows.
        num_columns: their length.
        seed: of the numbers.
        deviation: about the standard deviation of the numbers.
    """
    generator, kind = np.random.default_rng(seed), FORMATS[name]
    num_blocks = num_rows * num_columns // kind.block
    blocks = generator.integers(0, 256, (num_blocks, kind.block_bytes), np.uint8)
    sizes = deviation * generator.uniform(0.7, 1.3, (num_blocks, 1))
    for place, share in _FACTORS[name].items():
        blocks[:, place : place + 2] = (sizes * share).astype(np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def _format_of(tensor: str, formats: Mapping[str, str]) -> str:
    part = tensor.removeprefix("blk.").lstrip("0123456789.").removesuffix(".weight")
    return "F32" if not tensor.endswith(".weight") else formats.get(part, formats[""])
