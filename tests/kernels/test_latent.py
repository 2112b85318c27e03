"""Latent attention of the kernels that serve the CPU: what is written, attended and multiplied."""

from dataclasses import replace

import pytest
import torch

import kernels
from kernels import reference
from kernels.reference.cache import quantize_kv
from tests.support import latent_cases
from tests.support.attention_cases import make_case
from tests.support.kernel_checks import DTYPES, native_only, on_threads
from tests.support.latent_cases import check_head_linear
from tests.support.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

MIXES = [
    [(120, 1), (0, 29), (30, 1), (65, 6), (0, 1), (4, 2)],
    [(0, 1), (7, 1), (200, 1), (127, 1), (128, 1)],
    [(90, 5), (250, 150)],
]
# Elements of a cached vector, and those of them that are the value.
DIMS = [(32, 24), (576, 512), (6, 4), (7, 3), (40, 40), (80, 33)]


def latent_case(spans, num_heads, dims, dtype, **options):
    return make_case(
        spans,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=dims[0],
        value_dim=dims[1],
        scale=dims[0] ** -0.5,
        dtype=dtype,
        **options,
    )


@pytest.mark.parametrize(
    ("spans", "num_heads", "dims", "block_size", "dtype"),
    pairs(MIXES, [1, 5, 16], DIMS, [1, 16, 48], DTYPES),
)
def test_values_are_the_first_elements_of_keys(spans, num_heads, dims, block_size, dtype):
    output = latent_case(spans, num_heads, dims, dtype, block_size=block_size).check()
    assert output.shape[1:] == (num_heads, dims[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_heads_as_large_models_have(dtype):
    latent_case([(150, 2), (0, 3), (140, 1)], 128, (576, 512), dtype, block_size=16).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantized_cache(dtype):
    """Its results are those of the rounded numbers in the type of the queries."""
    case = latent_case(MIXES[0], 5, (32, 24), dtype, block_size=16)
    narrow, scales = quantize_kv(case.pool)
    kept = (narrow.float() * scales.unsqueeze(-1)).to(dtype)
    expected = replace(case, pool=kept).attend(module=reference)
    output = replace(case, pool=narrow, scales_pool=scales).attend()
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("dims", "num_heads", "block_size", "dtype"),
    pairs([(6, 24, 8), (1, 5, 2), (128, 512, 64), (8, 33, 10)], [1, 5, 16], [1, 16], DTYPES),
)
def test_latent_vectors_are_normed_rotated_and_written(dims, num_heads, block_size, dtype):
    latent_cases.make_case(
        plain_dim=dims[0],
        latent_dim=dims[1],
        rotary_dim=dims[2],
        num_heads=num_heads,
        block_size=block_size,
        dtype=dtype,
    ).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_vectors_in_a_quantized_cache(dtype):
    case = latent_cases.make_case(dtype=dtype, module=reference)
    narrow = latent_cases.quantized(latent_cases.make_case(dtype=dtype))
    assert torch.equal(case.run(), narrow.run())
    slots = case.meta.slot_mapping
    place = slots // 4, 1, 0, 0, slots % 4
    expected, scales = quantize_kv(case.pool[place])
    written = narrow.pool.view(torch.uint8)[place]
    assert torch.equal(written, expected.view(torch.uint8))
    assert torch.equal(narrow.scales[place], scales)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "shape", "num_copied", "dtype"),
    pairs([1, 3, 40], [1, 5, 16], [(24, 6), (512, 128), (33, 7), (128, 512)], [0, 1, 64], DTYPES),
)
def test_heads_have_matrices_of_their_own(num_tokens, num_heads, shape, num_copied, dtype):
    check_head_linear(kernels, num_tokens, num_heads, shape, num_copied=num_copied, dtype=dtype)


@native_only("torch sums in an order of its own")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads_chunks_or_other_sequences(dtype):
    case = latent_case([(0, 300), (130, 1)], 16, (32, 24), dtype, block_size=16)
    one, three = on_threads([1, 3], case.attend)
    assert torch.equal(one, three)
    for start in (0, 1, 129, 299):
        alone = replace(
            case,
            query=case.query[start:300],
            meta=kernels.AttentionMetadata(
                block_tables=case.meta.block_tables[:1],
                query_starts=torch.tensor([0, 300 - start], dtype=torch.int32),
                context_lens=case.meta.context_lens[:1],
                slot_mapping=case.meta.slot_mapping[start:300],
                max_query_len=300 - start,
                max_context_len=300,
            ),
        )
        assert torch.equal(alone.attend(), one[start:300])
