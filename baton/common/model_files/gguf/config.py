"""The files `config.json` and `generation_config.json` of the model in a GGUF file."""

from collections.abc import Mapping
from typing import Any

from baton.common.model_files.gguf.architecture import GgufArchitecture
from baton.common.model_files.gguf.architectures import architecture_of
from baton.common.model_files.gguf.header import GgufHeader
from baton.common.model_files.gguf.values import HeaderValues

__all__ = ["config_json", "generation_config_json"]

# From the architecture's keys to config.json's.
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
_READ_KEYS = frozenset(
    {
        *_SIZES,
        "block_count",
        "attention.causal",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    }
)
# From the names of GGML's types to those of the weights' types; quantized weights are computed
# in bfloat16, whose range is that of the models' training.
_DTYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
_QUANTIZED_DTYPE = "bfloat16"
# A control token with one of these texts ends a turn, even if the file's ids name another one.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<turn|>",
    "<|call|>",
    "<|return|>",
    "<|observation|>",  # GLM-4, behind a call
)
# In a vocabulary with the first of these tokens, that of gpt-oss, the second one ends a message,
# and further messages of the same turn may follow it.
_CALL_END, _MESSAGE_END = "<|call|>", "<|end|>"
_CONTROL = 3
_SAMPLING = "general.sampling."
# Keys after `_SAMPLING` whose names in generation_config.json are others.
_OTHER_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}


def config_json(header: GgufHeader) -> dict[str, Any]:
    """Returns the config of the model in a file, under config.json's names.

    Raises:
        ConfigurationError: the file has no language model of a supported architecture, or a key
            with an unsupported value; names the key.
    """
    architecture = architecture_of(header)
    values = HeaderValues(header, header.metadata["general.architecture"])
    values.refuse_others(_READ_KEYS | {architecture.epsilon} | architecture.keys)
    head_dim = values.head_dim
    return {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "dtype": _dtype(header),
        "hidden_act": "silu",
        **{name: values.integer(key) for key, name in _SIZES.items()},
        "intermediate_size": values.mlp_width,
        "num_hidden_layers": values.num_layers,
        "num_key_value_heads": _num_kv_heads(values, architecture),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(header),
        "rms_norm_eps": values.number(architecture.epsilon),
        "rope_parameters": _rope_parameters(values, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        **_token_ids(header),
        **architecture.fields(values),
    }


def generation_config_json(header: GgufHeader) -> dict[str, Any]:
    """Returns the ids that end a generation, and the sampling defaults that the file states."""
    stated = {
        _OTHER_NAMES.get(key, key): value
        for name, value in header.metadata.items()
        if (key := name.removeprefix(_SAMPLING)) != name
    }
    return {
        **stated,
        **_token_ids(header),
        "eos_token_id": sorted(_end_ids(header)),
    }


def _end_ids(header: GgufHeader) -> set[int]:
    types = header.metadata.get("tokenizer.ggml.token_type", ())
    ends = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(header.tokens, types, strict=False))
        if kind == _CONTROL and token in _END_OF_TURN
    }
    if _CALL_END in ends:
        ends.pop(_MESSAGE_END, None)
    named = [header.token_id(role) for role in ("eos", "eot", "eom")]
    return {*ends.values(), *(token_id for token_id in named if token_id is not None)}


def _num_kv_heads(values: HeaderValues, architecture: GgufArchitecture) -> int:
    """Returns the number of KV heads of the layers that have attention."""
    key = "attention.head_count_kv"
    if architecture.mixes_layers:
        numbers = {number for number in values.per_layer(key) if number}
        if len(numbers) != 1:
            raise values.unsupported(key)
        return numbers.pop()
    return values.integer(key, values.integer("attention.head_count"))


def _rope_parameters(
    values: HeaderValues, architecture: GgufArchitecture, head_dim: int
) -> dict[str, Any]:
    """Returns the rotary embedding; refuses one of another width than the architecture allows."""
    if values.integer("attention.value_length", head_dim) != head_dim:
        raise values.unsupported("attention.value_length")
    rotary_dim = values.integer("rope.dimension_count", head_dim)
    if rotary_dim == head_dim:
        return architecture.rope(values, head_dim)
    rotated = rotary_dim / head_dim
    is_possible = rotated < 1 and rotary_dim % 2 == 0 and int(head_dim * rotated) == rotary_dim
    if not architecture.rotates_part or not is_possible:
        raise values.unsupported("rope.dimension_count")
    return {**architecture.rope(values, rotary_dim), "partial_rotary_factor": rotated}


def _vocab_size(header: GgufHeader) -> int:
    """Returns the number of rows of the embedding, which may be more than there are tokens."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise header.refuse("it has no tensor token_embd.weight")
    num_tokens = len(header.tokens)
    if num_tokens > embedding.shape[0]:
        raise header.refuse(
            f"tokenizer.ggml.tokens has {num_tokens} tokens; "
            f"token_embd.weight has {embedding.shape[0]} rows"
        )
    return embedding.shape[0]


def _dtype(header: GgufHeader) -> str:
    """Returns the type of the matrices; norms and biases are float32 in all files."""
    types = {tensor.type_id for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return _DTYPES.get(types.pop(), _QUANTIZED_DTYPE) if len(types) == 1 else _QUANTIZED_DTYPE


def _token_ids(header: GgufHeader) -> Mapping[str, int]:
    """Returns the ids of special tokens by config.json's names."""
    names = {"bos": "bos", "eos": "eos", "padding": "pad"}
    token_ids = {f"{name}_token_id": header.token_id(role) for role, name in names.items()}
    return {name: token_id for name, token_id in token_ids.items() if token_id is not None}
