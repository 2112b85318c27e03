"""Tokens drawn by Triton equal those of the reference, in every row and way of drawing."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import INVALID_TOKEN
from kernels.reference import sampling as reference_sampling
from kernels.triton import draw_thresholds, sampling
from kernels.triton.draw_thresholds import find_thresholds
from kernels.triton.launch import (
    Rows,
    launch_table,
    load_launch_table,
    replaced_launch_table,
)
from kernels.triton.pointwise import row_maxima
from tests.support.devices import DEVICE
from tests.support.draw_cases import (
    LOGIT_KINDS,
    DrawCase,
    draw_table,
    make_draws,
    make_logits,
    table_on,
)

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.sampled(one_in=2)]

_TOKENS_PER_SPLIT = launch_table(DEVICE).draw_tokens.for_size(10**5).block_size * sampling._TILES


def _case(logits, draws, positions=None, **options):
    ids = torch.arange(len(draws.seed))
    positions = ids * 12_345 if positions is None else torch.tensor(positions)
    return DrawCase(logits, draws, ids, positions, **options)


def _check(case):
    assert case.draw(sampling, DEVICE).tolist() == case.expected().tolist()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("kind", LOGIT_KINDS)
@pytest.mark.parametrize("vocab_size", [5, pytest.param(700, marks=pytest.mark.slow)])
def test_tokens_equal_those_of_the_reference(kind, vocab_size):
    seed = LOGIT_KINDS.index(kind)
    logits = make_logits(kind, 4, vocab_size, seed)
    _check(_case(logits, make_draws(4, vocab_size, seed)))


@pytest.mark.parametrize(
    "vocab_size",
    [
        _TOKENS_PER_SPLIT + 1,
        pytest.param(_TOKENS_PER_SPLIT, marks=pytest.mark.slow),
        pytest.param(3 * _TOKENS_PER_SPLIT - 3, marks=pytest.mark.slow),
    ],
)
def test_vocabularies_of_several_splits(vocab_size):
    draws = draw_table((1.0, 0, 1.0, 1), (0.8, 50, 0.9, 2), (0.0, 0, 1.0, 3))
    logits = make_logits("normal", 3, vocab_size)
    _check(_case(logits, draws))
    # Only the last token is left; with one token more than a split, it has its own split.
    logits[:2] = -math.inf
    logits[:2, -1] = -5.0
    assert _case(logits, draws).draw(sampling, DEVICE)[:2].tolist() == [vocab_size - 1] * 2


@pytest.mark.slow
def test_a_large_vocabulary():
    draws = draw_table((1.3, 0, 0.95, 2**63 + 5), (1.0, 1000, 1.0, 6))
    _check(_case(make_logits("normal", 2, 128_257), draws))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(LOGIT_KINDS),
    vocab_size=st.integers(1, 700),
    seed=st.integers(0, 2**20),
)
def test_tokens_equal_those_of_the_reference_for_any_logits(kind, vocab_size, seed):
    _check(_case(make_logits(kind, 2, vocab_size, seed), make_draws(2, vocab_size, seed)))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(kind=st.sampled_from(LOGIT_KINDS), vocab_size=st.integers(1, 700), data=st.data())
def test_kept_tokens_equal_those_of_the_reference_for_any_logits(kind, vocab_size, data):
    seed = data.draw(st.integers(0, 2**20))
    logits, draws = make_logits(kind, 2, vocab_size, seed), make_draws(2, vocab_size, seed)
    kept, expected = _kept(logits, draws)
    assert torch.equal(kept, expected)


def _kept(logits, draws):
    """Returns which tokens the thresholds of Triton and the reference keep: `[rows, vocab]`."""
    draws = dataclasses.replace(draws, temperature=draws.temperature.clamp(min=1e-3))
    maxima, likeliest = row_maxima(logits.to(DEVICE))
    ids = torch.arange(len(logits), device=DEVICE)
    found = find_thresholds(
        logits.to(DEVICE), maxima, likeliest, table_on(DEVICE, draws), ids, None
    )
    scaled = (logits.double() - maxima.cpu().unsqueeze(-1)) / draws.temperature.unsqueeze(-1)
    expected = reference_sampling._thresholds(scaled, draws)
    return scaled >= found.cpu().unsqueeze(-1), scaled >= expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_programs_that_share_a_row_add_up_their_kept_weights(kind):
    block_size = launch_table(DEVICE).draw_thresholds.for_size(10**5).block_size
    tokens_per_split = block_size * draw_thresholds._TILES
    logits = make_logits(kind, 4, 2 * tokens_per_split + 3)
    logits[3, :tokens_per_split] = -math.inf  # the first program keeps no token
    records = [(1.0, 40, 1.0, 0), (2.0, 0, 0.9, 0), (1.0, 0, 1.0, 0), (0.7, 3000, 0.99, 0)]
    kept, expected = _kept(logits, draw_table(*records))
    assert torch.equal(kept, expected)
    assert kept[2].all()
    assert kept[:, tokens_per_split:].any(dim=-1).all()


# Top-k and top-p that are found at once, far below the maximum, among equals, and hot or cold.
_LIMITS = [(1.0, 7, 1.0), (1.0, 600, 1.0), (1.0, 0, 0.9), (0.01, 9, 0.99), (30.0, 300, 0.99)]


def _check_kept(scale):
    for kind in ("normal", "ties"):
        logits = make_logits(kind, len(_LIMITS), 700) * scale
        draws = draw_table(*((*limits, 0) for limits in _LIMITS))
        kept, expected = _kept(logits, draws)
        assert torch.equal(kept, expected), kind


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("capacity", "scale"), [(1, 1.0), (40, 1.0), (40, 20.0), (40, 0.01), (40, 1e30)]
)
def test_values_that_are_too_many_to_gather_are_searched_in_place(capacity, scale, monkeypatch):
    monkeypatch.setattr(draw_thresholds, "_CAPACITY", capacity)
    _check_kept(scale)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("num_passes", [1, 10])
def test_any_number_of_passes_before_gathering_keeps_the_same(num_passes):
    table = load_launch_table("cpu")
    (row,) = table.draw_thresholds.rows
    rows = Rows((dataclasses.replace(row, num_passes=num_passes),))
    with replaced_launch_table(dataclasses.replace(table, draw_thresholds=rows)):
        _check_kept(1.0)


def test_equal_values_beyond_the_room_for_gathered_ones():
    logits = torch.zeros(2, draw_thresholds._CAPACITY + 900)
    logits[:, 5], logits[1, 7:] = 0.5, -0.03
    kept, expected = _kept(logits, draw_table((1.0, 50, 1.0, 0), (1.0, 0, 0.5, 0)))
    assert torch.equal(kept, expected)


@pytest.mark.parametrize(
    ("top_k", "sign"), [(4, -1.0), pytest.param(1, 1.0, marks=pytest.mark.slow)]
)
def test_adjacent_numbers_are_distinguished(top_k, sign):
    """The threshold and the largest number lie in each of the search's sixteen intervals."""
    first = int(torch.tensor(1.5).view(torch.int32))
    bits = first + torch.arange(16).unsqueeze(-1) + torch.arange(7)
    logits = bits.int().view(torch.float32) * sign
    kept, expected = _kept(logits, draw_table(*[(1.0, top_k, 1.0, 0)] * 16))
    assert torch.equal(kept, expected)
    assert kept.sum(dim=-1).tolist() == [top_k] * 16


def test_tokens_after_an_exactly_reached_top_p_are_not_kept():
    """The first token alone makes up `top_p` of the weight, to the last unit of 2**-32."""
    second = round(math.exp(-0.5) * 2**32)
    top_p = 2**32 / (2**32 + second)
    assert top_p * (2**32 + second) == 2**32
    kept, expected = _kept(torch.tensor([[1.0, 0.5]]), draw_table((1.0, 0, top_p, 0)))
    assert kept.tolist() == expected.tolist() == [[True, False]]


def test_weights_are_rounded_to_whole_units():
    """Tokens of less than half a unit of 2**-32 weigh nothing, however many they are."""
    logits = torch.full((1, 1000), -22.9)
    logits[0, 0] = 0.0
    kept, expected = _kept(logits, draw_table((1.0, 0, math.nextafter(1.0, 0.0), 0)))
    assert torch.equal(kept, expected)
    assert kept.sum() == 1


def test_tokens_depend_on_every_noise_word_and_the_whole_seed_and_position():
    """With equal logits only the noise decides; tokens differ, and equal the reference's."""
    seeds = (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
    draws = draw_table(*((1.0, 0, 1.0, seed) for seed in seeds))
    case = _case(make_logits("equal", 7, 1030), draws, positions=[0, 1, 2, 3, 2**20, 2**31, 77])
    _check(case)
    assert len(set(case.draw(sampling, DEVICE).tolist())) > 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
def test_a_bad_row_is_invalid_and_does_not_affect_others(bad):
    logits = make_logits("normal", 6, 300)
    draws = draw_table(*[(0.0, 0, 1.0, 1), (1.0, 0, 1.0, 2), (1.0, 5, 0.5, 3)] * 2)
    expected = _case(logits, draws).expected().tolist()
    logits[:3] = -math.inf
    if bad != "all -inf":
        logits[:3, 20] = bad
    tokens = _case(logits, draws).draw(sampling, DEVICE).tolist()
    assert tokens == [INVALID_TOKEN] * 3 + expected[3:]


def test_several_draws_of_one_row_follow_entries_of_a_larger_table():
    draws = make_draws(9, 400, seed=3)
    case = DrawCase(
        make_logits("normal", 4, 400),
        draws,
        draw_ids=torch.tensor([8, 0, 3, 3, 5]),
        positions=torch.tensor([5, 9, 9, 10, 2**20]),
        logit_rows=torch.tensor([3, 0, 0, 0, 2]),
    )
    _check(case)


def test_fewer_draws_than_rows_use_the_first_rows():
    draws = draw_table((1.0, 0, 1.0, 4), (0.0, 0, 1.0, 0))
    _check(_case(make_logits("normal", 5, 90), draws))


def test_rows_may_be_strided():
    wide = torch.full((4, 900), math.nan)
    wide[:, :333] = make_logits("normal", 4, 333)
    _check(_case(wide[:, :333], draw_table(*((1.0, 20, 0.9, seed) for seed in range(4)))))


def test_tokens_are_written_to_out():
    case = _case(make_logits("normal", 3, 50), make_draws(3, 50))
    whole = torch.full((5,), -7, device=DEVICE)
    case.draw(sampling, DEVICE, out=whole[1:4])
    assert whole.tolist() == [-7, *case.expected().tolist(), -7]


def test_no_draws():
    case = _case(torch.zeros(0, 10), make_draws(1, 10)).replace(
        draw_ids=torch.zeros(0).long(), positions=torch.zeros(0).long()
    )
    assert case.draw(sampling, DEVICE).tolist() == []
    assert (
        sampling.token_logprobs(
            torch.zeros(0, 10, device=DEVICE),
            torch.zeros(0, device=DEVICE),
            torch.zeros(0, device=DEVICE).long(),
        ).tolist()
        == []
    )


@pytest.mark.parametrize("vocab_size", [1, 3, 100, 2048, 9001])
def test_logprobs(vocab_size):
    logits = make_logits("normal", 4, vocab_size)
    rows = torch.tensor([3, 0, 0, 1, 2])
    tokens = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0, -1])
    exact = logits.double().log_softmax(dim=-1)[rows, tokens.clamp(min=0)]
    found = sampling.token_logprobs(
        logits.to(DEVICE), logits.amax(dim=-1).to(DEVICE), tokens.to(DEVICE), rows.to(DEVICE)
    ).cpu()
    assert found.dtype == torch.float32
    assert found[4].isnan()
    torch.testing.assert_close(found[:4].double(), exact[:4], rtol=1e-6, atol=2e-6)


def test_logprobs_of_bad_rows_masked_tokens_and_huge_logits():
    logits = make_logits("normal", 5, 77)
    logits[0, 5], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 9] = -math.inf
    logits[4], logits[4, 30] = -1e38, 1e38
    maxima, likeliest = row_maxima(logits.to(DEVICE))
    tokens = torch.tensor([1, 5, 0, 9, int(likeliest[4])], device=DEVICE)
    found = sampling.token_logprobs(logits.to(DEVICE), maxima, tokens).tolist()
    assert [math.isnan(value) for value in found] == [True] * 3 + [False] * 2
    assert found[3:] == [-math.inf, 0.0]
