"""Writes a checkpoint folder as a GGUF file, as llama.cpp's converter does.

The names and the order of the tensors are those by which Baton reads such files. Matrices keep
their type, so that nothing is rounded; vectors are float32 in all GGUF files. The vocabulary is the
checkpoint's, but texts are split by GPT-2's rule: the file is for token ids.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

from baton.common.errors import ConfigurationError
from baton.common.model_files.gguf.architecture import GgufArchitecture, pairs_of_heads
from baton.common.model_files.gguf.dense_architectures import DENSE_ARCHITECTURES
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.runtime.weights.described_model import DescribedModel

__all__ = ["export_gguf"]

_MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Those whose files need no keys or conversions of their own."""
_PRE_TOKENIZER = "gpt-2"
_STORED = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


def export_gguf(folder: Path, file: Path) -> None:
    """Writes the model of a checkpoint folder, with a byte-level vocabulary, to a GGUF file.

    Raises:
        ConfigurationError: the model is of another family than Llama, Qwen2 and Qwen3, or has a
            scaled rotary embedding.
    """
    checkpoint = open_checkpoint(str(folder))
    config = DescribedModel.of(checkpoint).config
    model_type = checkpoint.config["model_type"]
    rope = checkpoint.config.get("rope_parameters") or {}
    if model_type not in _MODEL_TYPES or rope.get("rope_type", "default") != "default":
        raise ConfigurationError(
            f"{folder} cannot be written as a GGUF file: model_type is {model_type!r} and "
            f"rope_parameters {rope}; {', '.join(_MODEL_TYPES)} can, without scaling"
        )
    writer = gguf.GGUFWriter(file, model_type)
    _add_sizes(writer, config, checkpoint.config, rope)
    _add_vocabulary(writer, folder, config.vocab_size)
    for name, tensor in _tensors(checkpoint.weight_files):
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            _add_tensor(writer, DENSE_ARCHITECTURES[model_type], config.head_dim, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(
    writer: gguf.GGUFWriter, config: Any, stated: Mapping[str, Any], rope: Mapping[str, Any]
) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", stated.get("rope_theta", 10_000.0))))
    writer.add_layer_norm_rms_eps(stated["rms_norm_eps"])
    writer.add_vocab_size(config.vocab_size)


def _add_vocabulary(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Adds the tokens of tokenizer.json, and unused ones up to the size of the vocabulary."""
    content = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"]: token["special"] for token in content["added_tokens"]}
    ids = content["model"]["vocab"] | {t["content"]: t["id"] for t in content["added_tokens"]}
    by_id = {token_id: token for token, token_id in ids.items()}
    tokens = [by_id.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types([_token_type(token, token in ids, added) for token in tokens])
    merges = content["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])


def _token_type(token: str, is_known: bool, added: Mapping[str, bool]) -> gguf.TokenType:
    if not is_known:
        return gguf.TokenType.UNUSED
    if token not in added:
        return gguf.TokenType.NORMAL
    return gguf.TokenType.CONTROL if added[token] else gguf.TokenType.USER_DEFINED


def _tensors(files: tuple[Path, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no iterator
                yield name, file.get_tensor(name)


def _add_tensor(
    writer: gguf.GGUFWriter,
    architecture: GgufArchitecture,
    head_dim: int,
    name: str,
    tensor: torch.Tensor,
) -> None:
    """Adds a tensor of the checkpoint under its name in files, with its rows in their order."""
    stem, _, suffix = name.rpartition(".")
    names = architecture.model_names
    prefix = ""
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        prefix, names = f"blk.{layer}.", architecture.layer_names
    # The first name that stands for it: later ones are those of older converters.
    part = next(part for part, known in names.items() if known == stem)
    if part in ("attn_q", "attn_k") and architecture.orders is pairs_of_heads:
        tensor = _in_pairs(tensor, head_dim)
    kind = _STORED[torch.float32 if tensor.ndim == 1 else tensor.dtype]
    if kind == gguf.GGMLQuantizationType.BF16:  # numpy has no such type
        array = tensor.contiguous().view(torch.uint8).numpy()
    else:
        array = (tensor.float() if tensor.ndim == 1 else tensor).contiguous().numpy()
    writer.add_tensor(f"{prefix}{part}.{suffix}", np.asarray(array), raw_dtype=kind)


def _in_pairs(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Puts the rows of Q or K that are rotated together beside each other."""
    halves = rows.view(len(rows) // head_dim, 2, head_dim // 2, -1)
    return halves.transpose(1, 2).reshape(rows.shape)
