"""The files `config.json` and `generation_config.json` of the model in a GGUF file."""

import math
from collections.abc import Mapping
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.model_files.gguf.header import GgufHeader
from baton.common.model_files.gguf.rope import rope_parameters

__all__ = ["config_json", "generation_config_json"]

# Names of `general.architecture` and of `transformers`.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# From the architecture's keys to config.json's.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_READ_KEYS = frozenset(
    {
        *_SIZES,
        "attention.causal",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    }
)
# Values with which keys that are not read change nothing, besides 0 and false.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "embedding_scale": (1,),
    "expert_weights_scale": (1,),
    "logit_scale": (1,),
    "residual_scale": (1,),
    # Converters of the architectures above write their files in one order, whatever they name it.
    "tensor_data_layout": ("reference", "Meta AI original pth"),
}
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
)
_CONTROL = 3
_MAX_LAYERS = 1024  # a malformed file may state billions, for each of which modules are made
_MAX_INTEGER = 2**31 - 1
_SAMPLING = "general.sampling."
# Keys after `_SAMPLING` whose names in generation_config.json are others.
_OTHER_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}


def config_json(header: GgufHeader) -> dict[str, Any]:
    """Returns the config of the model in a file, under config.json's names.

    Raises:
        ConfigurationError: the file has no language model of a supported architecture, or a key
            with an unsupported value; names the key.
    """
    architecture = _architecture(header)
    values = _HeaderValues(header, architecture)
    values.refuse_others()
    if values.integer("block_count") > _MAX_LAYERS:
        raise values.unsupported("block_count")
    num_heads = values.integer("attention.head_count")
    head_dim = values.integer(
        "attention.key_length", values.integer("embedding_length") // num_heads
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.integer(key, head_dim) != head_dim:
            raise values.unsupported(key)
    biased = "blk.0.attn_q.bias" in header.tensors
    return {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "dtype": _dtype(header),
        "hidden_act": "silu",
        **{name: values.integer(key) for key, name in _SIZES.items()},
        "num_key_value_heads": values.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(header),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(header, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        # Qwen2 always has biases of Q, K and V, and never one of the output.
        **({} if architecture == "qwen2" else {"attention_bias": biased}),
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        **_token_ids(header),
    }


def generation_config_json(header: GgufHeader) -> dict[str, Any]:
    """Returns the ids that end a generation, and the sampling defaults that the file states."""
    types = header.metadata.get("tokenizer.ggml.token_type", ())
    ends = {header.token_id(role) for role in ("eos", "eot", "eom")}
    ends |= {
        token_id
        for token_id, (token, kind) in enumerate(zip(header.tokens, types, strict=False))
        if kind == _CONTROL and token in _END_OF_TURN
    }
    stated = {
        _OTHER_NAMES.get(key, key): value
        for name, value in header.metadata.items()
        if (key := name.removeprefix(_SAMPLING)) != name
    }
    return {
        **stated,
        **_token_ids(header),
        "eos_token_id": sorted(end for end in ends if end is not None),
    }


class _HeaderValues:
    """The keys of an architecture, such as `llama.block_count`."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._header = header
        self._prefix = f"{architecture}."

    def unsupported(self, key: str) -> ConfigurationError:
        """Returns the error for a key whose value is not supported."""
        value = self._header.metadata.get(self._prefix + key)
        return self._header.refuse(f"{self._prefix}{key} {value!r} is not supported")

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer.

        Raises:
            ConfigurationError: it is missing and has no default, or is something else.
        """
        value = self._scalar(key, default)
        if value is None:
            raise self._header.refuse(f"it has no {self._prefix}{key}")
        if type(value) is not int or not 0 < value <= _MAX_INTEGER:
            raise self.unsupported(key)
        return value

    def _scalar(self, key: str, default: int | None = None) -> Any:
        """Returns a value; that of all layers if the key has an equal one for each layer."""
        value = self._header.metadata.get(self._prefix + key, default)
        if not isinstance(value, list) or key == "block_count":
            return value
        is_per_layer = len(value) == self._scalar("block_count")
        return value[0] if is_per_layer and value.count(value[0]) == len(value) else value

    def number(self, key: str) -> float:
        """Returns a positive, finite number.

        Raises:
            ConfigurationError: it is missing or something else.
        """
        value = self._header.metadata.get(self._prefix + key)
        if value is None:
            raise self._header.refuse(f"it has no {self._prefix}{key}")
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise self.unsupported(key)
        return value

    def refuse_others(self) -> None:
        """Refuses keys that this module does not know; they change what the model computes.

        Raises:
            ConfigurationError: a key is unknown, and its value changes something.
        """
        for key, value in self._header.metadata.items():
            name = key.removeprefix(self._prefix)
            is_known = name in _READ_KEYS or name.startswith("rope.scal")
            if name != key and not is_known and not self._is_neutral(name, value):
                raise self.unsupported(name)
        if not self._header.metadata.get(f"{self._prefix}attention.causal", True):
            raise self.unsupported("attention.causal")

    def _is_neutral(self, key: str, value: Any) -> bool:
        """Whether the model computes the same with and without a key that is not read."""
        if key == "attention.sliding_window":  # no query sees fewer tokens than there are
            window = self._scalar(key)
            return type(window) is int and (window == 0 or window >= self.integer("context_length"))
        return not value or value in _NEUTRAL.get(key, ())


def _architecture(header: GgufHeader) -> str:
    """Returns the architecture of a file with one whole language model.

    Raises:
        ConfigurationError: the file has something else.
    """
    if header.metadata.get("general.type", "model") != "model":
        raise header.refuse(f"general.type {header.metadata['general.type']!r} is not supported")
    if header.metadata.get("split.count", 0) > 1:
        raise header.refuse(
            f"split.count {header.metadata['split.count']}: the model is split into several "
            "files; merge them with llama-gguf-split --merge"
        )
    architecture = header.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise header.refuse(
            f"general.architecture {architecture!r} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    return str(architecture)


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
