"""Tiny random checkpoints of every model family, and the tokens `transformers` generates.

`tiny_checkpoint(variant)` gives a folder with config, safetensors weights and
a byte-level tokenizer whose token ids 0 to 255 are the bytes themselves.
Weights are seeded and scaled so that logits spread and depend on the whole
context: a wrong KV entry changes the greedy tokens.
"""

import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from tests.support.expert_variants import EXPERT_VARIANTS, LATENT_VARIANTS

BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257
PAD_TOKEN_ID = 258
VOCAB_SIZE = 259
MAX_MODEL_LEN = 2048
SLIDING_WINDOW = 11
SMALL_WINDOW = 8

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt", "gpt2")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
}
_GATED: dict[str, Any] = {
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "tie_word_embeddings": False,
}


def _scaled_rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **parameters}}


def _layer_types(*kinds: str) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": [f"{kind}_attention" for kind in kinds],
    }


def _lfm2_layers(kinds: str) -> dict[str, Any]:
    types = {"c": "conv", "a": "full_attention"}
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": [types[kind] for kind in kinds],
    }


# variant -> (family, overrides of the family's config)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied_biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_rope_llama3": (
        "llama",
        _scaled_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama_rope_linear": ("llama", _scaled_rope("linear", factor=4.0)),
    "llama_rope_yarn": (
        "llama",
        _scaled_rope("yarn", factor=4.0, original_max_position_embeddings=512),
    ),
    "llama_sharded": ("llama", {"head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_sliding": ("mistral", {"sliding_window": SLIDING_WINDOW}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1},
    ),
    # Two layer groups, one per kind of attention.
    "qwen2_alternating": (
        "qwen2",
        {
            **_layer_types("full", "sliding", "full", "sliding"),
            "use_sliding_window": True,
            "sliding_window": SMALL_WINDOW,
        },
    ),
    # Groups of two layers; the third sliding group's second place stays empty.
    "qwen3_mostly_sliding": (
        "qwen3",
        {
            **_layer_types(*["sliding"] * 3, "full", *["sliding"] * 2, "full"),
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": SMALL_WINDOW,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_untied": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "opt": ("opt", {}),
    "opt_post_norm": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "gpt2": ("gpt2", {}),
    "gpt2_scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80}),
}

# Families that differ from Llama in fields of the config; they share its code, so the tests of
# engines, connectors and ranks take only some of them.
DECODER_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # The last layer has no rotary embedding.
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3_sliding": (
        "smollm3",
        {
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": SMALL_WINDOW,
        },
    ),
    "olmo2": ("olmo2", {"num_key_value_heads": 4}),
    # Two layer groups; only layers without a window have a scaled rotary embedding.
    "olmo3": (
        "olmo3",
        {
            **_layer_types("sliding", "sliding", "full", "sliding", "full"),
            "sliding_window": SMALL_WINDOW,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "cohere": ("cohere", {"attention_bias": True, "logit_scale": 0.3}),
    # Only layers with a window have a rotary embedding.
    "cohere2": (
        "cohere2",
        {
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "sliding_window": SMALL_WINDOW,
            "logit_scale": 1.7,
            "tie_word_embeddings": True,
        },
    ),
    # Neighbouring elements are rotated together.
    "ernie4_5": ("ernie4_5", {"head_dim": 24, "use_bias": True, "tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {"head_dim": 24}),  # biases of Q, K and V alone
    "seed_oss_output_bias": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "gemma2": (
        "gemma2",
        {
            "num_hidden_layers": 4,
            "hidden_size": 72,  # its root is not exact in 16 bits
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": SMALL_WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    # Layers of two shapes, keys that are values, and layers that read the KV of earlier ones.
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2
            + ["full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 300,
            "sliding_window": SLIDING_WINDOW,
            "tie_word_embeddings": True,
            "final_logit_softcapping": 5.0,
        },
    ),
    # Each layer has its own KV, and values of their own.
    "gemma4_own_kv": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "sliding_window": SLIDING_WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    # Experts beside MLPs; layers of two shapes that two ranks can divide.
    "gemma4_moe": (
        "gemma4_text",
        {
            **_layer_types("sliding", "full", "sliding", "full"),
            "num_key_value_heads": 4,
            "head_dim": 12,
            "global_head_dim": 24,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": SLIDING_WINDOW,
            "tie_word_embeddings": True,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    # Two layer groups, whose layers have different rotary embeddings.
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": SLIDING_WINDOW,
            "sliding_window_pattern": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.3,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.7,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    # Attention and MLP side by side, each with a norm; a part of each head is rotated.
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4, "hidden_size": 48, "rotary_pct": 0.34}),
    "gpt_neox_serial": (
        "gpt_neox",
        {
            "num_key_value_heads": 4,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "relu",
            "tie_word_embeddings": True,
        },
    ),
    "falcon": ("falcon", {"ffn_hidden_size": 80, "tie_word_embeddings": True}),
    "falcon_new": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon_serial": (
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon_one_norm": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 4,
            "num_ln_in_parallel_attn": 1,
        },
    ),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "phi3": ("phi3", {}),
    "phi3_partial": ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "phi3_sliding": ("phi3", {"sliding_window": SLIDING_WINDOW, "num_key_value_heads": 1}),
}

LONGROPE: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3_longrope": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.02, 1.05, 1.3, 1.4, 1.5],
                "long_factor": [1.1, 1.5, 3.0, 7.0, 20.0, 40.0],
            },
        },
    )
}
"""Further checkpoints, whose rotary embeddings depend on the longest sequence that is served."""

# Models with recurrent layers.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {**_lfm2_layers("cacca"), "tie_word_embeddings": True}),
    "lfm2_conv_last": ("lfm2", {**_lfm2_layers("accac"), "conv_L_cache": 4}),
    "lfm2_conv_first": (
        "lfm2",
        {**_lfm2_layers("cca"), "block_ff_dim": 150, "block_multiple_of": 32},
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 4,
            "full_attention_interval": 3,
            "head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 10,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "num_hidden_layers": 3,
            "full_attention_interval": 2,
            "head_dim": 24,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 9,
            "linear_value_head_dim": 14,
            "mlp_only_layers": [1],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {
            "num_hidden_layers": 3,
            "full_attention_interval": 2,
            "head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 26,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
        },
    ),
    "lfm2_biased": (
        "lfm2",
        {**_lfm2_layers("ca"), "conv_bias": True, "conv_L_cache": 2, "tie_word_embeddings": False},
    ),
}

_SIX_HEADS = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3}

SIX_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_six_heads": (
        "llama",
        {
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "intermediate_size": 80,
        },
    ),
    "lfm2_six_heads": ("lfm2", {**_lfm2_layers("caca"), **_SIX_HEADS}),
    "qwen3_next_six_heads": (
        "qwen3_next",
        {**HYBRIDS["qwen3_next"][1], **_SIX_HEADS, "num_hidden_layers": 4},
    ),
    "opt_six_heads": ("opt", {"num_attention_heads": 6, "hidden_size": 72}),
    "gpt2_six_heads": ("gpt2", {"num_attention_heads": 6, "hidden_size": 72}),
}
"""Further checkpoints, for three ranks."""

FOUR_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{variant}_four_layers": (family, {**overrides, "num_hidden_layers": 4})
    for variant, (family, overrides) in VARIANTS.items()
    if variant.split("_")[-1] in (*FAMILIES, "biased", "sliding", "norm")
} | {
    "lfm2_biased_four_layers": ("lfm2", {**HYBRIDS["lfm2_biased"][1], **_lfm2_layers("acac")}),
    "qwen3_5_four_layers": (
        "qwen3_5_text",
        {**HYBRIDS["qwen3_5"][1], "full_attention_interval": 2},
    ),
    "qwen3_next_four_layers": (
        "qwen3_next",
        {**HYBRIDS["qwen3_next"][1], "num_hidden_layers": 4, "linear_num_key_heads": 2},
    ),
}
"""Further checkpoints, for two and four stages of a pipeline."""


@cache
def tiny_checkpoint(variant: str) -> Path:
    """Returns the folder of the variant's checkpoint, made once per run; do not change it."""
    folder = _run_folder() / variant
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=_run_folder()) as draft:
            _write_checkpoint(variant, Path(draft) / variant)
            try:
                (Path(draft) / variant).rename(folder)
            except OSError:  # another process has made the same one meanwhile
                assert folder.exists()
    return folder


def _write_checkpoint(variant: str, folder: Path) -> None:
    import transformers

    decoders = VARIANTS | DECODER_VARIANTS | LONGROPE | HYBRIDS | SIX_HEADS | FOUR_LAYERS
    family, overrides = (decoders | EXPERT_VARIANTS | LATENT_VARIANTS)[variant]
    config = _family_config(family, overrides)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, seed=crc32(variant.encode()))
    shard_size = "200KB" if variant.endswith("sharded") else "1GB"
    model.save_pretrained(folder, max_shard_size=shard_size)
    save_byte_tokenizer(folder)


def reference_greedy(path: Path, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Returns the greedy tokens of `transformers` with its KV cache; no end token stops it."""
    return list(_reference_greedy(path, tuple(prompt_ids), num_tokens))


@cache
def _reference_greedy(path: Path, prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Many tests of all processes compare with the same generations, which are slow."""
    if path.parent != _run_folder():
        return _generate(path, prompt_ids, num_tokens)
    name = f"{path.name}-{hashlib.sha256(repr(prompt_ids).encode()).hexdigest()}.json"
    kept = _run_folder() / name
    tokens = tuple(json.loads(kept.read_text())) if kept.exists() else ()
    if len(tokens) < num_tokens:
        tokens = _generate(path, prompt_ids, num_tokens)
        draft = kept.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(tokens))
        draft.replace(kept)
    return tokens[:num_tokens]


def _generate(path: Path, prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    import transformers

    model = reference_model(path)
    token_ids = torch.tensor([prompt_ids])
    kv_cache, drawn = transformers.DynamicCache(config=model.config), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = logits_with_cache(model, token_ids, kv_cache)
            token_ids = logits[:, -1:].argmax(-1)
            drawn.append(int(token_ids))
    return tuple(drawn)


def logits_with_cache(
    model: torch.nn.Module, token_ids: torch.Tensor, kv_cache: object
) -> torch.Tensor:
    """Returns logits of tokens after those in `kv_cache`, a `transformers.Cache`; extends it.

    Releases of `transformers` before 5.24 call the argument `past_key_values`.
    """
    takes_cache = "cache" in inspect.signature(model.forward).parameters
    argument = {"cache" if takes_cache else "past_key_values": kv_cache}
    return model(token_ids, **argument, use_cache=True).logits


def reference_beams(
    path: Path, prompt: Sequence[int], *, num_beams: int, num_returned: int, max_tokens: int
) -> tuple[list[list[int]], list[float]]:
    """The generated tokens of the best hypotheses of a beam search, and their scores."""
    output = reference_model(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=num_beams,
        num_return_sequences=num_returned,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [row[len(prompt) :].tolist() for row in output.sequences]
    return sequences, output.sequences_scores.tolist()


@cache
def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The `transformers` model of a checkpoint, with plain ("eager") attention and experts."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """A random prompt of byte tokens; prompts of one seed are prefixes of each other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (MAX_MODEL_LEN,), generator=generator)[:num_tokens].tolist()


def save_byte_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json: one token per byte, three specials."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(byte_level_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_MODEL_LEN,
    ).save_pretrained(folder)


def byte_level_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def _family_config(family: str, overrides: dict[str, Any]) -> Any:
    import transformers

    extra: dict[str, Any] = _GATED
    if family == "opt":
        extra = {"ffn_dim": 96}
    elif family == "gpt2":
        extra = {}
    return transformers.AutoConfig.for_model(family, **{**_COMMON, **extra, **overrides})


# By name; the sums of some gates of gpt-oss are beyond their limits.
_SCALES = {"bias": 0.2, "gate_up_proj_bias": 3.0, "sinks": 1.0}
_BUFFERS = {"e_score_correction_bias": (0.0, 0.3), "layer_scalar": (1.0, 0.2)}


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    """Gives every parameter random values, scaled so that each layer affects the logits."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(noise, type(module).__name__, name))
        for name, (mean, deviation) in _BUFFERS.items():
            if (buffer := getattr(module, name, None)) is not None:
                buffer.copy_(mean + torch.randn(buffer.shape, generator=generator) * deviation)


def _scaled(noise: torch.Tensor, module_kind: str, name: str) -> torch.Tensor:
    if module_kind in ("Linear", "FalconLinear") and name == "weight":
        return noise * 1.5 / noise.shape[1] ** 0.5
    if module_kind == "Conv1d" and name == "weight":
        return noise * 1.0
    if module_kind == "Conv1D" and name == "weight":
        return noise * 1.5 / noise.shape[0] ** 0.5
    if module_kind.endswith("Router") and name == "weight":
        return noise * 1.5 / noise.shape[1] ** 0.5
    if noise.dim() == 3:  # of all experts
        return noise * 1.5 / noise.shape[2] ** 0.5
    if name in _SCALES:
        return noise * _SCALES[name]
    if name in ("A_log", "dt_bias"):
        # Slow decay: outputs are normalized, which would enlarge the errors of almost empty states.
        return noise * 0.5 - 2
    has_offset = module_kind in (
        "Gemma2RMSNorm",
        "Gemma3RMSNorm",
        "Qwen3_5RMSNorm",
        "Qwen3_5MoeRMSNorm",
        "Qwen3NextRMSNorm",
    )
    if has_offset and "Norm" in module_kind:
        return noise * 0.2  # the factor is 1 + weight
    if "Norm" in module_kind or name in ("scale", "per_expert_scale"):
        return 1 + noise * 0.2
    return noise * 0.15  # embeddings


@cache
def _run_folder() -> Path:
    """The folder that all processes of a run of pytest share; see tests/conftest.py."""
    return Path(os.environ["PYTEST_CHECKPOINTS"])
