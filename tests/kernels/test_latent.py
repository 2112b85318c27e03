"""Latent attention of the kernels that serve the CPU: what is written, attended and multiplied."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

import kernels
from kernels import Arena
from kernels.reference.cache import quantize_kv
from kernels.reference.pointwise import apply_rotary
from tests.support import latent_cases
from tests.support.attention_cases import make_case
from tests.support.kernel_checks import (
    CPU,
    DTYPES,
    eps_of,
    filled_weight,
    native_only,
    normal,
    on_threads,
)
from tests.support.latent_cases import check_head_linear, filled_stack
from tests.support.paged_batches import shuffled_tables, step_metadata
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


@pytest.mark.parametrize("narrow_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantized_cache(dtype, narrow_dtype):
    latent_case(MIXES[0], 5, (32, 24), dtype, block_size=16).quantized(narrow_dtype).check()


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


@pytest.mark.parametrize("narrow_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_vectors_in_a_quantized_cache(dtype, narrow_dtype):
    case = latent_cases.make_case(dtype=dtype)
    narrow = latent_cases.quantized(latent_cases.make_case(dtype=dtype), narrow_dtype)
    assert torch.equal(case.run(), narrow.run())
    slots = case.meta.slot_mapping
    place = slots // 4, 1, 0, 0, slots % 4
    expected, scales = quantize_kv(case.pool[place], narrow_dtype)
    written = narrow.pool.view(torch.uint8)[place]
    assert torch.equal(written, expected.view(torch.uint8))
    assert torch.equal(narrow.scales[place], scales)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "shape", "num_copied", "dtype"),
    pairs([1, 3, 40], [1, 5, 16], [(24, 6), (512, 128), (33, 7), (128, 512)], [0, 1, 64], DTYPES),
)
def test_heads_have_matrices_of_their_own(num_tokens, num_heads, shape, num_copied, dtype):
    check_head_linear(kernels, num_tokens, num_heads, shape, num_copied=num_copied, dtype=dtype)


class LatentLayer:
    """A layer of latent attention in absorbed form, over tokens that are the first of a sequence.

    K of head h is `K_h @ normed latent`, then the rotated part that all heads share; V of head h is
    `V_h @ normed latent`.
    """

    NUM_HEADS, PLAIN, ROTARY, LATENT, VALUE = 5, 12, 8, 24, 10

    def __init__(self, num_tokens, dtype):
        self.hidden = normal(num_tokens, 48, dtype=dtype)
        shape = self.NUM_HEADS * (self.PLAIN + self.ROTARY), 48
        self.queries = normal(*shape, dtype=dtype, seed=1) / 7
        self.latents = normal(self.LATENT + self.ROTARY, 48, dtype=dtype, seed=2) / 7
        self.norm = normal(self.LATENT, dtype=dtype, seed=3)
        self._frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01])
        # Rows of K and V by columns of the normed latent vector, for each head.
        self.keys = normal(self.NUM_HEADS, self.PLAIN, self.LATENT, dtype=dtype, seed=4) / 5
        self.values = normal(self.NUM_HEADS, self.VALUE, self.LATENT, dtype=dtype, seed=5) / 5
        self._weights = filled_weight(self.queries), filled_weight(self.latents)
        self._absorbing = filled_stack(kernels, self.keys.transpose(1, 2))
        self._decompressing = filled_stack(kernels, self.values)
        tables, num_blocks = shuffled_tables([num_tokens], 16, 0)
        self.positions, self.meta = step_metadata([(0, num_tokens)], tables, 16)
        shape = num_blocks, 1, 1, 16, self.LATENT + self.ROTARY
        self.pool = torch.full(shape, torch.nan, dtype=dtype)

    def rotation(self):
        return kernels.rotary_angles(self.positions, self._frequencies, 1.0)

    def run(self):
        query = kernels.linear(self.hidden, self._weights[0])
        query = kernels.rotate_and_write_latent(
            query.view(len(query), self.NUM_HEADS, -1),
            kernels.linear(self.hidden, self._weights[1]),
            self.pool,
            self.meta,
            norm_weight=self.norm,
            eps=1e-6,
            rotation=self.rotation(),
        )
        absorbed = kernels.head_linear(query, self._absorbing)
        attended = kernels.paged_attention(
            absorbed, self.pool, self.meta, scale=0.2, value_dim=self.LATENT
        )
        return kernels.head_linear(attended, self._decompressing)

    def expected(self):
        """Returns ordinary attention over decompressed K and V, in float64."""
        hidden, rotation = self.hidden.double(), self.rotation()
        query = (hidden @ self.queries.double().T).unflatten(1, (self.NUM_HEADS, -1))
        latent = hidden @ self.latents.double().T
        plain, turned = query.split((self.PLAIN, self.ROTARY), dim=2)
        unnormed, key = latent.split((self.LATENT, self.ROTARY), dim=1)
        cos, sin = rotation.cos.double(), rotation.sin.double()
        query = torch.cat((plain, apply_rotary(turned, cos, sin)), dim=2)
        normed = unnormed / (unnormed.square().mean(1, keepdim=True) + 1e-6).sqrt()
        normed = normed * self.norm.double()
        keys = torch.einsum("hpl,tl->htp", self.keys.double(), normed)
        turned = apply_rotary(key.unsqueeze(1), cos, sin).transpose(0, 1)
        keys = torch.cat((keys, turned.expand(self.NUM_HEADS, -1, -1)), dim=2)
        values = torch.einsum("hvl,tl->htv", self.values.double(), normed)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1), keys, values, is_causal=True, scale=0.2
        )
        return attended.transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 150])
def test_the_absorbed_form_is_attention_over_decompressed_keys_and_values(num_tokens, dtype):
    layer = LatentLayer(num_tokens, dtype)
    error = (layer.run().double() - layer.expected()).abs()
    assert error.max() < 40 * eps_of(dtype)


@native_only("other kernels record nothing")
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_is_recorded(dtype):
    layer = LatentLayer(19, dtype)
    output, step = kernels.record_step(CPU, Arena(), layer.run)
    assert step is not None
    assert torch.equal(output, layer.run())
    layer.hidden.copy_(normal(*layer.hidden.shape, seed=9))
    assert torch.equal(step.run(), layer.run())


@native_only("torch sums in an order of its own")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [16, 40, 128])
def test_threads_that_share_the_heads_of_a_token_give_the_same_bits(num_heads, dtype):
    case = latent_case([(200, 1)], num_heads, (32, 24), dtype, block_size=16)
    one, several, many = on_threads([1, 3, 8], case.check)
    assert torch.equal(one, several)
    assert torch.equal(one, many)


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
