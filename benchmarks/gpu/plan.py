"""The sizes and parts of a run: everything on a GPU, or a tiny version on the CPU. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["FULL", "MODELS", "SMOKE", "Part", "Plan", "parts_of", "time_for"]

_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
_QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}
_TINY = _LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
MODELS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {"llama-3.1-8b": _LLAMA_8B, "qwen3-0.6b": _QWEN3_06B, "tiny": _TINY}
)
"""The fields of a config.json, by the name of the model."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a run.

    Attributes:
        device: torch's name for it.
        dtype: type of weights, KV and activations.
        models: names in `MODELS` whose decoding and prompts are measured.
        kernels_of: the model whose shapes the kernels get.
        copied_bytes: size of each buffer that the copy bandwidth is measured with.
        matrix_size: size of the square product that the matrix rate is measured with.
        rotated_bytes: size of all copies of a kernel's inputs, far larger than a cache.
        max_copies: most copies of a kernel's inputs.
        sample_s: seconds to spend on samples of one figure.
        batch_sizes: sequences of a decode step.
        contexts: tokens of each sequence.
        num_steps: decode steps per figure.
        prompts: (prompts, tokens of each) of a prefill.
        kernel_prompts: (tokens cached, tokens computed) of prefill attention.
        rows: rows of pointwise kernels, products and sampling.
        num_moved_blocks: blocks gathered or scattered at once.
        max_batched_tokens: most tokens of a step.
        tier_requests: (requests, prompt tokens, output tokens) of the two tiers.
        served: (requests, prompt tokens, output tokens) beside transformers.
        num_gpu_blocks: blocks of each pool; None for what memory allows.
    """

    device: str
    dtype: str
    models: tuple[str, ...]
    kernels_of: str
    copied_bytes: int
    matrix_size: int
    rotated_bytes: int
    max_copies: int
    sample_s: float
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    num_steps: int
    prompts: tuple[tuple[int, int], ...]
    kernel_prompts: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    num_moved_blocks: int
    max_batched_tokens: int
    tier_requests: tuple[tuple[int, int, int], ...]
    served: tuple[int, int, int]
    num_gpu_blocks: int | None


FULL = Plan(
    device="cuda",
    dtype="bfloat16",
    models=("llama-3.1-8b", "qwen3-0.6b"),
    kernels_of="llama-3.1-8b",
    copied_bytes=2**32,
    matrix_size=8192,
    rotated_bytes=2**30,
    max_copies=256,
    sample_s=0.15,
    batch_sizes=(1, 16, 64, 256),
    contexts=(512, 8192),
    num_steps=64,
    prompts=((1, 2048), (1, 8192), (4, 2048)),
    kernel_prompts=((0, 2048), (0, 8192), (6144, 2048)),
    rows=(1, 64, 256, 8192),
    num_moved_blocks=256,
    max_batched_tokens=8192,
    tier_requests=((1, 2048, 64), (16, 2048, 64)),
    served=(64, 512, 128),
    num_gpu_blocks=None,
)
SMOKE = Plan(
    device="cpu",
    dtype="float32",
    models=("tiny",),
    kernels_of="tiny",
    copied_bytes=2**20,
    matrix_size=64,
    rotated_bytes=2**16,
    max_copies=2,
    sample_s=0.0,
    batch_sizes=(1, 3),
    contexts=(20, 48),
    num_steps=4,
    prompts=((1, 33), (2, 20)),
    kernel_prompts=((0, 20), (17, 9)),
    rows=(1, 5),
    num_moved_blocks=3,
    max_batched_tokens=64,
    tier_requests=((2, 20, 4),),
    served=(3, 12, 5),
    num_gpu_blocks=64,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run.

    Attributes:
        name: the name by which `--part` chooses it.
        module: the module whose `measure` runs it.
        weight: its share of the time, relative to the other parts.
        model: the model that it measures, if any.
        needs: modules that it imports besides those that every part needs.
    """

    name: str
    module: str
    weight: float
    model: str | None = None
    needs: tuple[str, ...] = ()


_SERVER_MODULES = (
    *("cryptography", "grpc", "grpc_health", "grpc_reflection", "jinja2", "jwt"),
    *("prometheus_client", "tokenizers"),
)


def parts_of(plan: Plan) -> list[Part]:
    """Returns the parts in order. Rates come first: the figures of other parts refer to them."""
    package = "benchmarks.gpu.parts"
    served, largest = plan.models, plan.models[0]
    return [
        Part("rates", f"{package}.rates", 25),
        Part("kernels", f"{package}.kernels", 110),
        *(Part(f"model {name}", f"{package}.model", 90, name) for name in plan.models),
        Part("tiers", f"{package}.tiers", 80, largest, _SERVER_MODULES),
        *(Part(f"transformers {name}", f"{package}.transformers", 50, name) for name in served),
    ]


def time_for(parts: Sequence[Part], index: int, seconds_left: float) -> float:
    """Returns the seconds for a part. Time that earlier parts left is shared by all later ones."""
    return seconds_left * parts[index].weight / sum(part.weight for part in parts[index:])
