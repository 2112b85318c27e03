"""The Triton kernels under the names and signatures of `kernels.reference`.

For tensors on CUDA devices, and with `TRITON_INTERPRET=1` on the CPU. What torch's own
operations do as fast, or nobody waits for, is the reference's.
"""

from kernels.reference import (
    embed,
    make_weight,
    point_to,
    record_step,
    take_rows,
    write_table_entries,
)
from kernels.triton.attention import paged_attention
from kernels.triton.blocks import copy_blocks, gather_blocks, scatter_blocks, swap_blocks
from kernels.triton.cache import rotate_and_write_kv
from kernels.triton.linear import linear, linear_silu_and_mul
from kernels.triton.pointwise import rms_norm, rotary_angles, row_maxima
from kernels.triton.row_state import keep_drawn, lay_out_decode
from kernels.triton.sampling import draw_tokens, token_logprobs

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
