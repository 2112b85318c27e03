"""Triton's latent attention, and what it writes to the cache, against float64."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels import reference
from kernels.triton import latent, linear
from tests.support import latent_cases
from tests.support.devices import DEVICE, rounding_error
from tests.support.pairs import pairs
from tests.support.triton_attention import attend, check, make_case

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXES = [
    [(0, 1), (130, 1), (63, 1)],
    [(0, 40), (100, 1), (62, 8)],
    [(700, 1), (3, 1)],  # a divided context
]
# Elements of a cached vector, and those of them that are the value.
DIMS = [(32, 24), (7, 3), (40, 40), (80, 33)]


def latent_case(spans, num_heads, dims, dtype, block_size=16):
    return make_case(
        spans,
        num_heads=num_heads,
        head_dim=dims[0],
        value_dim=dims[1],
        dtype=dtype,
        block_size=block_size,
    )


@pytest.mark.parametrize(
    ("spans", "num_heads", "dims", "block_size", "dtype"),
    pairs(MIXES, [1, 5, 16], DIMS, [3, 16], DTYPES),
)
def test_values_are_the_first_elements_of_keys(spans, num_heads, dims, block_size, dtype):
    output = check(latent_case(spans, num_heads, dims, dtype, block_size))
    assert output.shape[1:] == (num_heads, dims[1])


@pytest.mark.parametrize("num_heads", [16, 80])
def test_sizes_of_large_models(num_heads):
    check(latent_case([(40, 1), (3, 2)], num_heads, (576, 512), torch.bfloat16))


@pytest.mark.parametrize("spans", [MIXES[0], MIXES[2]])
def test_a_quantized_cache(spans):
    check(latent_case(spans, 5, (32, 24), torch.bfloat16).quantized())


def test_bits_do_not_depend_on_the_other_sequences():
    case = latent_case([(200, 3), (33, 3)], 5, (32, 24), torch.bfloat16)
    alone = replace(
        case,
        query=case.query[3:],
        meta=replace(
            case.meta,
            block_tables=case.meta.block_tables[1:],
            query_starts=case.meta.query_starts[:2],
            context_lens=case.meta.context_lens[1:],
            slot_mapping=case.meta.slot_mapping[3:],
        ),
    )
    assert torch.equal(attend(alone), attend(case)[3:])


@pytest.mark.parametrize(
    ("num_tokens", "shape", "num_copied", "dtype"),
    pairs([1, 3], [(24, 6), (33, 7), (64, 128)], [0, 64], DTYPES),
)
def test_heads_have_matrices_of_their_own(num_tokens, shape, num_copied, dtype):
    ops = SimpleNamespace(
        make_weight_stack=reference.make_weight_stack, head_linear=linear.head_linear
    )
    options = {"num_copied": num_copied, "dtype": dtype, "device": DEVICE}
    latent_cases.check_head_linear(ops, num_tokens, 5, shape, **options)


def write_case(dtype=torch.float32, module=latent, **options):
    return latent_cases.make_case(
        spans=[(30, 1), (0, 2), (13, 2)],
        dtype=dtype,
        module=module,
        device=DEVICE,
        rounding=rounding_error(dtype),
        **options,
    )


@pytest.mark.parametrize(
    ("dims", "num_heads", "dtype"),
    pairs([(6, 24, 8), (1, 5, 2), (128, 512, 64), (8, 33, 10)], [1, 5, 80], DTYPES),
)
def test_latent_vectors_are_normed_rotated_and_written(dims, num_heads, dtype):
    write_case(
        dtype, plain_dim=dims[0], latent_dim=dims[1], rotary_dim=dims[2], num_heads=num_heads
    ).check()


@pytest.mark.parametrize(
    ("factor", "narrow_dtype"),
    [(0.01, torch.int8), (100.0, torch.int8), (100.0, torch.float8_e4m3fn)],
)
def test_latent_vectors_in_a_quantized_cache(factor, narrow_dtype):
    """The largest number is in the normed part or in the rotated one."""
    case = latent_cases.quantized(write_case(), narrow_dtype)
    expected = latent_cases.quantized(write_case(module=reference), narrow_dtype)
    for each in (case, expected):
        each.latent[:, -8:] *= factor
    torch.testing.assert_close(case.run(), expected.run())
    slots = case.meta.slot_mapping
    place = slots // 4, 1, 0, 0, slots % 4
    torch.testing.assert_close(case.scales[place], expected.scales[place])
    narrow, wanted = (
        each.pool.view(torch.uint8)[place].view(narrow_dtype).float() for each in (case, expected)
    )
    # Sums in another order may round a number to its neighbour.
    torch.testing.assert_close(
        narrow, wanted, rtol=0.13, atol=2**-9 if narrow_dtype.is_floating_point else 1
    )
    assert (narrow == wanted).float().mean() > 0.95
    assert case.pool[:, 0].view(torch.uint8).eq(0xFF).all()
