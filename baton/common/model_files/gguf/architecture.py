"""`GgufArchitecture`: the config and the tensors' names of one architecture of GGUF files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.common.model_files.gguf.rope import rope_parameters
from baton.common.model_files.gguf.values import HeaderValues

__all__ = ["GgufArchitecture", "TensorOrder", "pairs_of_heads"]

_Fields = Callable[[HeaderValues], Mapping[str, Any]]
_Rope = Callable[[HeaderValues, int], dict[str, Any]]

# Names in GGUF files and in checkpoints, without `.weight` and `.bias`.
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output": "lm_head"}
# Names of the norm after the last layer, by the age of the converter.
_FINAL_NORMS = ("output_norm", "token_embd_norm")
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
class TensorOrder:
    """Where a file has the rows or the columns of a checkpoint's tensor.

    Attributes:
        rows: row i of each group of `len(rows)` rows is row `rows[i]` of the same group in the
            file; empty: all rows are where the checkpoint has them.
        columns: column i is column `columns[i]` in the file; empty: the same of columns.
    """

    rows: Sequence[int] = ()
    columns: Sequence[int] = ()


_Orders = Callable[[HeaderValues], Mapping[str, TensorOrder]]


def pairs_of_heads(values: HeaderValues) -> Mapping[str, TensorOrder]:
    """Returns the orders of Q and K in files that have them for interleaved rotary embeddings.

    The elements that are rotated together follow each other in such files; in the checkpoint
    they are half a head apart.
    """
    order = TensorOrder(rows=[*range(0, values.head_dim, 2), *range(1, values.head_dim, 2)])
    return {"attn_q": order, "attn_k": order}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How files state models of one architecture.

    Attributes:
        model_class: name of the model's class in `transformers`.
        model_type: its name in config.json.
        keys: keys of the architecture that `fields` reads.
        fields: returns the fields of config.json that only this architecture has.
        epsilon: the key with the epsilon of norms.
        names: by names of a layer's tensors in files, those in checkpoints; for those that have
            other names than in a Llama model. A name with `.weight` or `.bias` stands for the whole
            name. `{expert}` stands for the number of an expert; files have one tensor for all.
        final_norm: the checkpoint's name of the norm after the last layer.
        rope: returns config.json's `rope_parameters`, of the number of elements of a head that are
            rotated.
        rotates_part: whether files may state that only the first elements of a head are rotated.
        orders: returns, by names of a layer's tensors in files, the orders of those that files
            have in another order than the checkpoint.
        joined: by names of a layer's tensors in files, the tensors whose rows follow its rows in
            the checkpoint's tensor. The order of the rows is that of all of them.
        mixes_layers: whether some layers have no attention, for which files state 0 KV heads.
        norm_offset: what is added to the weights of norms in files.
        plain_norms: norms of a layer to which nothing is added.
        conversions: by names of a layer's tensors in files, functions that make the checkpoint's
            numbers of the file's.
        new_axes: by names of a layer's tensors in files, the place of an axis of length one that
            the checkpoint's tensors have and the file's lack.
        is_latent: whether attention is latent, and so heads have no common width.
    """

    model_class: str
    model_type: str
    keys: frozenset[str] = frozenset()
    fields: _Fields = field(default=lambda _: {})
    epsilon: str = "attention.layer_norm_rms_epsilon"
    names: Mapping[str, str] = field(default_factory=dict)
    final_norm: str = "model.norm"
    rope: _Rope = rope_parameters
    rotates_part: bool = False
    orders: _Orders = field(default=lambda _: {})
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)
    mixes_layers: bool = False
    norm_offset: int = 0
    plain_norms: frozenset[str] = frozenset()
    conversions: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    new_axes: Mapping[str, int] = field(default_factory=dict)
    is_latent: bool = False

    @property
    def layer_names(self) -> Mapping[str, str]:
        """By names of a layer's tensors in files, those in checkpoints."""
        return {**_LAYER_NAMES, **self.names}

    @property
    def model_names(self) -> Mapping[str, str]:
        """The same of tensors outside of layers."""
        return {**_MODEL_NAMES, **dict.fromkeys(_FINAL_NORMS, self.final_norm)}
