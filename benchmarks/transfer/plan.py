"""The sizes of a run: shapes of KV, numbers of blocks, prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvstore.layout import DTYPE_BYTES, KvLayout

__all__ = ["FULL", "SMOKE", "Plan", "PromptCase"]

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class PromptCase:
    """Prompts of one length. Each has new tokens."""

    num_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        shapes: the shapes of the blocks to move, by the model that has them.
        rounds: for each number of blocks, how many rounds count. One more round precedes them.
        least_cold_bytes: least size of the buffers between which memory is copied; 0 for a size
            that no cache holds.
        prompts: the prompts for two tiers.
        whole_prompt_tokens: the longest prompt that the undivided engine answers too.
        model: config.json of the model that answers the prompts.
        chunk_tokens: most prompt tokens of a step.
    """

    shapes: Mapping[str, KvLayout]
    rounds: Mapping[int, int]
    least_cold_bytes: int
    prompts: tuple[PromptCase, ...]
    whole_prompt_tokens: int
    model: Mapping[str, Any]
    chunk_tokens: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Size of a token's keys and values over all layers of the model."""
        num_features = self.model["num_key_value_heads"] * self.model["head_dim"]
        dtype_bytes = DTYPE_BYTES[self.model["dtype"]]
        return int(2 * self.model["num_hidden_layers"] * num_features * dtype_bytes)


def _layout(num_layers: int, num_kv_heads: int, head_dim: int) -> KvLayout:
    return KvLayout(num_layers, num_kv_heads, _BLOCK_SIZE, head_dim, "bfloat16")


_MODEL: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
)
"""A model so small that a CPU computes 16k tokens in seconds. A token's KV has 4 KiB."""

FULL = Plan(
    shapes=MappingProxyType(
        {
            "qwen2-0.5b": _layout(24, 2, 64),
            "llama-3.2-1b": _layout(16, 8, 64),
            "llama-3-8b": _layout(32, 8, 128),
        }
    ),
    rounds=MappingProxyType({1: 20, 16: 10, 256: 4}),
    least_cold_bytes=0,
    prompts=(PromptCase(1024, 5), PromptCase(4096, 3), PromptCase(16_384, 1)),
    whole_prompt_tokens=4096,
    model=_MODEL,
    chunk_tokens=256,
)
SMOKE = Plan(
    shapes=MappingProxyType({"tiny": _layout(2, 2, 16)}),
    rounds=MappingProxyType({1: 1, 3: 1}),
    least_cold_bytes=1 << 20,
    prompts=(PromptCase(96, 1),),
    whole_prompt_tokens=96,
    model=MappingProxyType(
        dict(_MODEL) | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
    ),
    chunk_tokens=32,
)
