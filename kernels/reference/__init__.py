"""Every primitive in plain torch: the oracle that faster kernels are tested against.

Runs on any device and in any floating dtype. Sums that decide accuracy are
done in float32. Block ids and slots are trusted: whoever schedules checks them.
"""

from kernels.reference.attention import paged_attention
from kernels.reference.blocks import copy_blocks, gather_blocks, scatter_blocks, swap_blocks
from kernels.reference.cache import rotate_and_write_kv
from kernels.reference.linear import (
    embed,
    linear,
    linear_silu_and_mul,
    make_weight,
    take_rows,
)
from kernels.reference.pointwise import rms_norm, rotary_angles, row_maxima
from kernels.reference.row_state import keep_drawn, lay_out_decode, write_table_entries
from kernels.reference.sampling import draw_tokens, token_logprobs
from kernels.reference.steps import mark_step, point_to, record_step

__all__ = [
    "copy_blocks",
    "draw_tokens",
    "embed",
    "gather_blocks",
    "keep_drawn",
    "lay_out_decode",
    "linear",
    "linear_silu_and_mul",
    "make_weight",
    "mark_step",
    "paged_attention",
    "point_to",
    "record_step",
    "rms_norm",
    "rotary_angles",
    "rotate_and_write_kv",
    "row_maxima",
    "scatter_blocks",
    "swap_blocks",
    "take_rows",
    "token_logprobs",
    "write_table_entries",
]
