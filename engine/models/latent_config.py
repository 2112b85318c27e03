"""`LatentConfig`: latent attention as a checkpoint's config.json describes it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.models.config_fields import ConfigFieldError, ConfigFields, unsupported

__all__ = ["LatentConfig", "latent_config"]

_HEAD_MATRIX = re.compile(r"\.k_b_proj\.weight$")
_MAX_WIDTH = 2**16  # modules have parts for each head, before the weights' shapes are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """The widths of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        query_rank: width of the vector that the queries of all heads are computed from; None if
            they are computed from hidden states.
        latent_dim: width of the vector that the keys and values of all heads are computed from.
        rotary_dim: width of a query's part that is rotated, and of the key's, which all heads
            share.
        key_dim: width of the other part of a head's query and key.
        value_dim: width of a head's value.
        has_head_matrices: whether the checkpoint has the matrices of the absorbed form, k_b_proj
            and v_b_proj, in place of kv_b_proj.
    """

    query_rank: int | None
    latent_dim: int
    rotary_dim: int
    key_dim: int
    value_dim: int
    has_head_matrices: bool = False

    @property
    def head_dim(self) -> int:
        """Width of what the cache has of a token."""
        return self.latent_dim + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """Width of a head's query, as it is projected."""
        return self.key_dim + self.rotary_dim

    def stored_as(self, names: Iterable[str]) -> "LatentConfig":
        """Returns the config for a checkpoint with tensors of these names."""
        return replace(self, has_head_matrices=any(map(_HEAD_MATRIX.search, names)))


def latent_config(fields: ConfigFields) -> LatentConfig:
    """Reads the widths.

    Raises:
        ConfigFieldError: a field has an unsupported value.
    """
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name):
            raise unsupported(name, value=True)
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.optional_count("num_key_value_heads") or num_heads
    if num_kv_heads != num_heads:
        raise ConfigFieldError(
            f"num_key_value_heads is {num_kv_heads}; with latent attention it must be "
            f"num_attention_heads {num_heads}"
        )
    rotary_dim = fields.count("qk_rope_head_dim", _MAX_WIDTH)
    if rotary_dim % 2:  # elements are rotated in pairs
        raise unsupported("qk_rope_head_dim", rotary_dim)
    return LatentConfig(
        query_rank=fields.optional_count("q_lora_rank", _MAX_WIDTH),
        latent_dim=fields.count("kv_lora_rank", _MAX_WIDTH),
        rotary_dim=rotary_dim,
        key_dim=fields.count("qk_nope_head_dim", _MAX_WIDTH),
        value_dim=fields.count("v_head_dim", _MAX_WIDTH),
    )
