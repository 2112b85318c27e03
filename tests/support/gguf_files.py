"""Writes GGUF files of tiny models and of tokenizers, as llama.cpp's converter does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.support.checkpoints import byte_level_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# One merge, as a byte-level vocabulary without any is refused.
BYTE_TOKENS = [*byte_level_alphabet(), "<bos>", "<eos>", "\u0120t"]
BYTE_TOKENIZER: Mapping[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": BYTE_TOKENS,
    "tokenizer.ggml.token_type": [NORMAL] * 256 + [CONTROL, CONTROL, NORMAL],
    "tokenizer.ggml.merges": ["\u0120 t"],
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, int | None]] | None = None,
    part_tensors: int = 0,
) -> Path:
    """Writes a file, or several; entries that are None are left out. Returns the first one's path.

    Args:
        path: of the file.
        metadata: by key.
        tensors: by name, the numbers or the bytes, and the type if these are bytes.
        part_tensors: how many tensors a file has at most; 0 for all of them in one.
    """
    architecture = metadata.get("general.architecture") or ""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    for key, value in metadata.items():
        if value is not None and key != "general.architecture":
            _add(writer, key, value)
    for name, (array, kind) in (tensors or {}).items():
        writer.add_tensor(name, array, raw_dtype=kind and gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def model_metadata(config: Any) -> dict[str, Any]:
    """The keys of a model; `config` is that of `transformers`."""
    kind = config.model_type
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        keys["rope.dimension_count"] = head_dim
    named = {f"{kind}.{key}": value for key, value in keys.items()}
    return {"general.architecture": kind, **BYTE_TOKENIZER, **named}


def save_model(
    path: Path,
    model: Any,
    kind: gguf.GGMLQuantizationType,
    part_tensors: int = 0,
    **metadata: Any,
) -> dict[str, torch.Tensor]:
    """Writes a model of `transformers` and returns its weights as the file's type rounds them.

    Args:
        path: of the file.
        model: the model.
        kind: type of the matrices.
        part_tensors: how many tensors a file has at most; 0 for all of them in one.
        metadata: changes of the keys, with `__` for a dot.
    """
    changes = {key.replace("__", "."): value for key, value in metadata.items()}
    tensors, rounded = {}, {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored = stored_array(weight.numpy(), kind)
        rounded[name] = torch.from_numpy(dequantized(stored))
        is_rotated = ".q_proj." in name or ".k_proj." in name
        if model.config.model_type == "llama" and is_rotated:
            stored = (in_pairs(stored[0], model.config.head_dim), stored[1])
        tensors[gguf_name(name)] = stored
    write_gguf(path, {**model_metadata(model.config), **changes}, tensors, part_tensors)
    return rounded


def transformers_model(path: Path, dtype: torch.dtype) -> Any:
    """Returns the `transformers` model of a llama file, read by the `gguf` package."""
    import transformers

    reader = gguf.GGUFReader(path)
    keys = {
        name: reader.fields[f"llama.{key}"].contents()
        for key, name in {
            "block_count": "num_hidden_layers",
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "feed_forward_length": "intermediate_size",
            "attention.head_count": "num_attention_heads",
            "attention.head_count_kv": "num_key_value_heads",
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
            "rope.freq_base": "rope_theta",
            "vocab_size": "vocab_size",
        }.items()
    }
    rope = {"rope_type": "default", "rope_theta": keys.pop("rope_theta")}
    config = transformers.LlamaConfig(**keys, rope_parameters=rope, tie_word_embeddings=True)
    names = {gguf_name(name): name for name in transformers.LlamaForCausalLM(config).state_dict()}
    weights = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            pairs = array.reshape(-1, config.head_dim // 2, 2, array.shape[-1])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        weights[names[tensor.name]] = torch.from_numpy(np.array(array))
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights, strict=False)
    return model.to(dtype).eval()


def stored_array(
    weight: np.ndarray, kind: gguf.GGMLQuantizationType
) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Returns a tensor as a file stores it; vectors are float32 in all files."""
    if weight.ndim == 1:
        return weight, gguf.GGMLQuantizationType.F32
    return gguf.quantize(weight, kind), kind


def dequantized(stored: tuple[np.ndarray, gguf.GGMLQuantizationType]) -> np.ndarray:
    """Returns the numbers of a stored tensor."""
    return np.array(gguf.dequantize(*stored))


def in_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Puts the elements that a rotary embedding pairs beside each other."""
    halves = rows.reshape(len(rows) // head_dim, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def gguf_name(name: str) -> str:
    """Returns a checkpoint tensor's name in a GGUF file."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def save_rounded(folder: Path, model: Any, weights: Mapping[str, torch.Tensor]) -> Path:
    """Writes the checkpoint folder of a model with other weights."""
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(folder)
    return folder


def tokenizer_metadata(
    backend: Any, pre: str, added: Sequence[tuple[str, bool]] = (), **changes: Any
) -> dict[str, Any]:
    """The keys of a byte-level tokenizer of the `tokenizers` package.

    Args:
        backend: the tokenizer.
        pre: name of its rule for words.
        added: (text, whether it is special) of the tokens that were added to its vocabulary.
        changes: further keys, without the first part.
    """
    import json

    model = json.loads(backend.to_str())["model"]
    by_id = {index: token for token, index in backend.get_vocab().items()}
    tokens = [by_id[index] for index in range(len(by_id))]
    kinds = {text: CONTROL if is_special else USER_DEFINED for text, is_special in added}
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [kinds.get(token, NORMAL) for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
