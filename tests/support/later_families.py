"""One variant of a checkpoint of each family that came after the first six."""

__all__ = ["HYBRID_FAMILIES", "LATER_FAMILIES"]

HYBRID_FAMILIES = ("lfm2", "qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families with recurrent layers."""
LATER_FAMILIES = (
    *HYBRID_FAMILIES,
    *("cohere", "cohere2", "ernie4_5", "falcon_new", "gemma2", "gemma3", "gemma4", "gemma4_moe"),
    *("glm4", "gpt_neox", "granite", "olmo2", "olmo3", "phi3_partial", "seed_oss", "smollm3"),
    *("glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)
