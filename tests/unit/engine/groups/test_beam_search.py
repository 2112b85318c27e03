"""Beam search compared with `transformers`: same sequences and scores from tiny random models.

The models compute in float64, so that their logits, cast to float32 as in `transformers`,
depend neither on the batch nor on the machine.
"""

import random
from functools import cache

import pytest
import torch
import transformers

from baton.common.request.sampling_params import SamplingParams
from engine.groups.beam_search import BeamResult, BeamSearch, BeamStep
from tests.support.checkpoints import prompt_of, reference_model, tiny_checkpoint
from tests.support.pairs import pairs

LENGTH_PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
EARLY_STOPPINGS = (True, False, "never")
DUMMY_SCORE = -1e8  # `transformers` pads its results with hypotheses of score -1e9


@cache
def tiny_model(vocab_size, seed):
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=None,
        pad_token_id=None,  # the embedding of a padding token would be zeros
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    return model.to(torch.float64).eval()


def reported_top_tokens(model, prompt, beams, num_top):
    """Returns the most likely next tokens of each beam, as a runner reports them."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *beam] for beam in beams])).logits[:, -1].float()
        top = torch.log_softmax(logits, -1).topk(min(num_top, logits.shape[-1]))
    return [
        list(zip(ids, logprobs, strict=True))
        for ids, logprobs in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def beam_search_results(model, prompt, search):
    (top,) = reported_top_tokens(model, prompt, [()], search.num_top)
    steps = search.start(top)
    beams = [(step.token_id,) for step in steps]
    while not search.is_done:
        steps = search.advance(reported_top_tokens(model, prompt, beams, search.num_top))
        beams = [(*beams[step.parent], step.token_id) for step in steps]
    return search.results()


def transformers_results(model, prompt, *, params, stop_token_ids, max_tokens):
    """Returns (tokens, is_stopped, score) of each hypothesis of `transformers`, without padding."""
    width = params.beam_width
    beams = {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=width,
        num_return_sequences=params.n,
        eos_token_id=sorted(stop_token_ids) or None,
        pad_token_id=0,
        max_new_tokens=max_tokens,
        return_dict_in_generate=True,
        output_scores=True,
        **(beams if width > 1 else {}),
    )
    scores = [None] if width == 1 else output.sequences_scores.tolist()
    rows = output.sequences[:, len(prompt) :].tolist()
    return [
        (*_unpadded(row, stop_token_ids), score)
        for row, score in zip(rows, scores, strict=True)
        if score is None or score > DUMMY_SCORE
    ]


def _unpadded(row, stops):
    end = next((i for i, token_id in enumerate(row) if token_id in stops), None)
    return (tuple(row), False) if end is None else (tuple(row[: end + 1]), True)


def check_same_results(model, prompt, **case):
    """Checks that `BeamSearch` and `transformers` find the same, and returns the results."""
    results = beam_search_results(model, prompt, BeamSearch(**case))
    expected = transformers_results(model, prompt, **case)
    assert [(r.token_ids, r.is_stopped) for r in results] == [e[:2] for e in expected]
    if case["params"].beam_width > 1:  # `transformers` returns no scores for greedy search
        scores = pytest.approx([e[2] for e in expected], abs=1e-5, rel=1e-6)
        assert [r.score for r in results] == scores
    return results


def sample_stop_tokens(rng, model, prompt, count, **case):
    """Returns up to `count` random tokens of what a search without stop tokens finds."""
    results = check_same_results(model, prompt, stop_token_ids=frozenset(), **case)
    tokens = sorted({token_id for result in results for token_id in result.token_ids})
    return frozenset(rng.sample(tokens, min(count, len(tokens))))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    pairs((1, 2, 3, 4, 5), LENGTH_PENALTIES, EARLY_STOPPINGS),
)
def test_results_equal_those_of_transformers(width, length_penalty, early_stopping):
    rng = random.Random(f"{width} {length_penalty} {early_stopping}")
    num_stopped = 0
    for num_stops in (1, 1, 2, 3):
        vocab_size = rng.randint(11, 32)
        model = tiny_model(vocab_size, seed=rng.randrange(4))
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 5))]
        case = {
            "params": SamplingParams(
                n=rng.randint(1, width),
                beam_width=width,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
            ),
            "max_tokens": rng.randint(1, 20),
        }
        stops = sample_stop_tokens(rng, model, prompt, num_stops, **case)
        results = check_same_results(model, prompt, stop_token_ids=stops, **case)
        num_stopped += any(result.is_stopped for result in results)
    assert num_stopped


@pytest.mark.parametrize("early_stopping", [False, "never"])
@pytest.mark.parametrize("vocab_size", [2, 3, 4, 7])
def test_results_equal_those_of_transformers_for_vocabularies_smaller_than_the_beam_width(
    vocab_size, early_stopping
):
    for max_tokens, num_stops in [(1, 0), (1, 1), (2, 0), (2, 1), (3, 1), (9, 1), (9, 0)]:
        check_same_results(
            tiny_model(vocab_size, seed=0),
            prompt=[0],
            params=SamplingParams(n=6, beam_width=6, early_stopping=early_stopping),
            stop_token_ids=frozenset(range(num_stops)),
            max_tokens=max_tokens,
        )


@pytest.mark.parametrize("variant", ["llama", "gpt2", "opt", "qwen3"])
def test_results_equal_those_of_transformers_in_each_model_family(variant):
    model = reference_model(tiny_checkpoint(variant), torch.float64)
    rng = random.Random(variant)
    num_stopped = 0
    for seed, scoring in enumerate(({}, {"length_penalty": 0.0, "early_stopping": True})):
        prompt = prompt_of(num_tokens=9 + 8 * seed, seed=seed)
        case = {"params": SamplingParams(n=4, beam_width=4, **scoring), "max_tokens": 16}
        stops = sample_stop_tokens(rng, model, prompt, 3, **case)
        results = check_same_results(model, prompt, stop_token_ids=stops, **case)
        num_stopped += any(result.is_stopped for result in results)
    assert num_stopped


STOP = 9


def scripted_search(*tops, width=2, max_tokens=10, **params):
    """Runs a search on the top tokens of the prompt and of each later step.

    Returns the search and the `BeamStep`s of each step.
    """
    search = BeamSearch(
        SamplingParams(n=width, beam_width=width, **params),
        stop_token_ids=frozenset({STOP}),
        max_tokens=max_tokens,
    )
    steps = [search.start(tops[0])]
    steps += [search.advance(step_tops) for step_tops in tops[1:]]
    return search, steps


def test_num_top_is_the_beam_width_plus_the_number_of_stop_tokens():
    assert scripted_search([(1, -1.0), (2, -2.0)])[0].num_top == 3


def test_beams_continue_their_parents_in_order_of_likelihood():
    _, steps = scripted_search(
        [(1, -0.1), (2, -0.2), (3, -3.0)],
        [[(4, -0.9), (5, -1.0), (6, -2.0)], [(7, -0.1), (8, -0.85), (6, -2.0)]],
    )
    assert steps == [
        [BeamStep(0, 1), BeamStep(0, 2)],
        [BeamStep(1, 7), BeamStep(0, 4)],
    ]


def test_ties_go_to_the_earlier_beam_and_then_to_the_token_reported_first():
    top = [(3, -1.0), (2, -1.0), (1, -1.0)]
    _, steps = scripted_search(top, [top, top])
    assert steps == [[BeamStep(0, 3), BeamStep(0, 2)], [BeamStep(0, 3), BeamStep(0, 2)]]


def test_a_stop_token_less_likely_than_every_beam_ends_no_hypothesis():
    search, steps = scripted_search([(1, -0.1), (2, -0.2), (STOP, -0.3)], max_tokens=2)
    assert steps == [[BeamStep(0, 1), BeamStep(0, 2)]]
    search.advance([[(3, -0.1), (4, -0.4)], [(STOP, -0.1), (5, -0.2)]])
    assert search.is_done
    assert search.results() == [
        BeamResult((1, 3), pytest.approx(-0.1), is_stopped=False),
        BeamResult((2, STOP), pytest.approx(-0.15), is_stopped=True),
    ]


UNLIKELY_STOPS = (
    [(1, -0.1), (STOP, -4.0), (2, -5.0)],
    [[(3, -0.1), (STOP, -4.0), (4, -5.0)], [(5, -9.0), (6, -9.1), (7, -9.2)]],
)


@pytest.mark.parametrize(("early_stopping", "is_done"), [(True, True), (False, False)])
def test_early_stopping_ends_the_search_once_there_are_as_many_hypotheses_as_beams(
    early_stopping, is_done
):
    search, steps = scripted_search(*UNLIKELY_STOPS, early_stopping=early_stopping)
    assert search.is_done == is_done
    assert steps[-1] == ([] if is_done else [BeamStep(0, 3), BeamStep(0, 4)])


LIKELY_STOPS = (
    [(1, -1.0), (STOP, -1.1), (2, -1.2)],
    [[(STOP, -0.1), (3, -2.0), (4, -2.1)], [(5, -9.0), (6, -9.1), (7, -9.2)]],
)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [
        (False, 1.0, True),  # -3.0 / 2 is worse than -1.1
        ("never", 1.0, False),  # -3.0 / 10 is better
        ("never", 0.0, True),
        ("never", -1.0, True),
    ],
)
def test_the_search_ends_when_the_likeliest_beam_cannot_improve_the_results(
    early_stopping, length_penalty, is_done
):
    params = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    search, _ = scripted_search(*LIKELY_STOPS, **params)
    assert search.is_done == is_done


def test_a_negative_length_penalty_is_applied_to_the_present_length_in_never_mode():
    params = {"early_stopping": "never", "length_penalty": -1.0}
    search, _ = scripted_search(*UNLIKELY_STOPS, max_tokens=100, **params)
    assert not search.is_done  # -0.2 * 2 is better than -4.1 * 2, but -0.2 * 100 is worse


def test_better_hypotheses_displace_worse_ones():
    search, _ = scripted_search(
        *UNLIKELY_STOPS,
        [[(STOP, -0.1), (8, -8.0), (7, -9.0)], [(8, -5.0), (7, -6.0), (6, -7.0)]],
    )
    assert search.is_done
    assert [result.token_ids for result in search.results()] == [(1, 3, STOP), (1, STOP)]


@pytest.mark.parametrize("length_penalty", [1e6, -1e6])
def test_an_extreme_length_penalty_gives_valid_results(length_penalty):
    search, _ = scripted_search(*LIKELY_STOPS, max_tokens=2, length_penalty=length_penalty)
    assert {result.token_ids for result in search.results()} <= {(STOP,), (1, STOP), (1, 3)}


def test_the_search_ends_when_only_stop_tokens_are_left():
    search, steps = scripted_search([(STOP, -0.1)])
    assert search.is_done
    assert steps == [[]]
    assert search.results() == [BeamResult((STOP,), pytest.approx(-0.1), is_stopped=True)]


def test_a_very_long_hypothesis_does_not_overflow_the_stack():
    search = BeamSearch(SamplingParams(beam_width=1), stop_token_ids=frozenset(), max_tokens=20_000)
    search.start([(0, 0.0)])
    while not search.is_done:
        search.advance([[(1, 0.0)]])
    (result,) = search.results()
    assert result.token_ids == (0,) + (1,) * 19_999
