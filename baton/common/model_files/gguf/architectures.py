"""The architectures that GGUF files may state, and the config and tensors that follow from each.

Files have the values in which models of an architecture differ, and leave out what all of them
share; `llama.cpp` has the rest in its code, and so has this module. A checkpoint of `transformers`
has all of it in config.json.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from baton.common.model_files.gguf.header import GgufHeader
from baton.common.model_files.gguf.rope import rope_parameters
from baton.common.model_files.gguf.values import HeaderValues

__all__ = ["GgufArchitecture", "architecture_of"]

_Fields = Callable[[HeaderValues], Mapping[str, Any]]
_Rope = Callable[[HeaderValues, int], dict[str, Any]]

# Names in GGUF files and in checkpoints, without `.weight` and `.bias`.
_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How files state models of one architecture.

    Attributes:
        model_class: name of the model's class in `transformers`.
        model_type: its name in config.json.
        keys: keys of the architecture that `fields` reads.
        fields: returns the fields of config.json that only this architecture has.
        names: by names of a layer's tensors in files, those in checkpoints; for those that have
            other names than in a Llama model.
        rope: returns config.json's `rope_parameters`, of the number of elements of a head that are
            rotated.
        rotates_part: whether files may state that only the first elements of a head are rotated.
        has_pairs: whether files have the rows of Q and K in the order of interleaved rotary
            embeddings, while the checkpoint has them in the order of halves.
        norm_offset: what is added to the weights of norms in files.
    """

    model_class: str
    model_type: str
    keys: frozenset[str] = frozenset()
    fields: _Fields = field(default=lambda _: {})
    names: Mapping[str, str] = field(default_factory=dict)
    rope: _Rope = rope_parameters
    rotates_part: bool = False
    has_pairs: bool = False
    norm_offset: int = 0

    @property
    def layer_names(self) -> Mapping[str, str]:
        """By names of a layer's tensors in files, those in checkpoints."""
        return {**_LAYER_NAMES, **self.names}

    @property
    def model_names(self) -> Mapping[str, str]:
        """The same of tensors outside of layers."""
        return _MODEL_NAMES


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Returns the architecture of a file with one whole language model.

    Raises:
        ConfigurationError: the file has something else, or the architecture is not supported.
    """
    if header.metadata.get("general.type", "model") != "model":
        raise header.refuse(f"general.type {header.metadata['general.type']!r} is not supported")
    name = header.metadata.get("general.architecture")
    architecture = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise header.refuse(
            f"general.architecture {name!r} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    return architecture


_ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(
            model_class="LlamaForCausalLM", model_type="llama", has_pairs=True
        ),
        "qwen2": GgufArchitecture(model_class="Qwen2ForCausalLM", model_type="qwen2"),
        "qwen3": GgufArchitecture(model_class="Qwen3ForCausalLM", model_type="qwen3"),
    }
)
