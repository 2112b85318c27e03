"""A decoder's shape, as far as its primitives see it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["DecoderShape"]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What decides the sizes of a decoder's matrices and of its KV cache.

    Attributes:
        width: features of a hidden state.
        num_gated: features between the gated layer and the one after it.
        num_layers: which share a KV pool.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: features of a head.
        vocab_size: rows of the embedding and of the head.
        has_tied_head: whether the embedding is the head too, in the layout of linear layers.
    """

    width: int
    num_gated: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_tied_head: bool

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "DecoderShape":
        """From the fields of a checkpoint's config.json."""
        width, num_heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            width=width,
            num_gated=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or width // num_heads,
            vocab_size=config["vocab_size"],
            has_tied_head=config.get("tie_word_embeddings", False),
        )

    @property
    def num_query_features(self) -> int:
        """Of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_kv_features(self) -> int:
        """Of all heads of keys; of values there are as many."""
        return self.num_kv_heads * self.head_dim
