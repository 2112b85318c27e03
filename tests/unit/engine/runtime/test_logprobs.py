"""`ReportedTokens` and `PromptTokens` against plain float64."""

import numpy as np
import pytest
import torch

from engine.batch import INVALID_TOKEN, NO_LOGPROBS, ScheduledBatch, ScheduledChunk
from engine.draw_params import DrawParams
from engine.runtime.draws import logprobs as module
from engine.runtime.draws.logprobs import PromptTokens, ReportedTokens
from engine.runtime.draws.sampler import Scores, draw_record
from kernels import DRAW_RECORD
from kernels.reference.pointwise import row_maxima
from tests.support.draw_params import draw_params
from tests.support.logprob_checks import check_details

CPU = torch.device("cpu")
VOCAB_SIZE = 37
DRAWS = (
    draw_params(0.0, 3, 0.5, 0),
    draw_params(0.5, 0, 1.0, 1),
    draw_params(1.5, 6, 1.0, 2),
    draw_params(1.0, 0, 0.6, 3),
    draw_params(0.8, 9, 0.8, 4),
)


def scores_of(logits: torch.Tensor) -> Scores:
    return Scores(logits, *row_maxima(logits))


def random_logits(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn((num_rows, VOCAB_SIZE), generator=generator) * 4


def records_of(draws) -> np.ndarray:
    return np.array([draw_record(draw) for draw in draws], DRAW_RECORD)


def report(scores, raw, tokens, nums, rows, draws=None, *, is_processed=False):
    reported = ReportedTokens.among(
        np.array(nums),
        np.array(rows),
        records_of(draws or [DRAWS[0]] * len(nums)),
        CPU,
        is_processed=is_processed,
    )
    assert reported is not None
    return reported.read(reported.compute(scores, raw, torch.tensor(tokens)))


@pytest.mark.parametrize("num_elements", [2**23, 2 * VOCAB_SIZE, 1])
def test_rows_report_what_they_ask_for(num_elements, monkeypatch):
    monkeypatch.setattr(module, "_PART_ELEMENTS", num_elements)
    logits = random_logits(4)
    tokens, rows = [3, 0, 36, 3, 20], [3, 0, 0, 1, 2]  # two draws from row 0
    nums = [0, 20, NO_LOGPROBS, 5, 1]
    found = report(scores_of(logits), scores_of(logits), tokens, nums, rows)
    assert found[2] is None
    expected = logits.double().log_softmax(-1)
    for token_id, row, num, details in zip(tokens, rows, nums, found, strict=True):
        if num != NO_LOGPROBS:
            check_details(expected[row], token_id, details, num)


def test_rows_that_ask_for_nothing_report_nothing():
    nums = np.array([NO_LOGPROBS] * 3)
    records = records_of([DRAWS[0]] * 3)
    assert ReportedTokens.among(nums, np.arange(3), records, CPU, is_processed=True) is None


@pytest.mark.parametrize("is_processed", [True, False])
def test_the_distribution_is_the_models_own_or_the_one_drawn_from(is_processed):
    raw, changed = random_logits(5), random_logits(5)
    changed[:, ::2] = -torch.inf  # as rules would ban tokens
    tokens = (changed.argmax(-1)).tolist()
    found = report(
        scores_of(changed),
        scores_of(raw),
        tokens,
        [VOCAB_SIZE // 2] * 5,
        range(5),
        DRAWS,
        is_processed=is_processed,
    )
    for row, details in enumerate(found):
        expected = drawn_from(changed[row], DRAWS[row]) if is_processed else raw[row].double()
        check_details(expected.log_softmax(-1), tokens[row], details, VOCAB_SIZE // 2)


def drawn_from(logits: torch.Tensor, draw: DrawParams) -> torch.Tensor:
    if draw.params.temperature == 0:
        return logits.double()
    scaled = logits.double() / draw.params.temperature
    if draw.params.top_k:
        scaled[scaled < scaled.sort(descending=True).values[draw.params.top_k - 1]] = -torch.inf
    ordered, order = scaled.softmax(-1).sort(descending=True)
    scaled[order[ordered.cumsum(-1) - ordered >= draw.params.top_p]] = -torch.inf
    return scaled


def test_a_row_that_is_not_finite_spoils_no_other():
    logits = random_logits(3)
    logits[1] = torch.nan
    found = report(scores_of(logits), scores_of(logits), [4, INVALID_TOKEN, 9], [2, 2, 2], range(3))
    expected = logits.double().log_softmax(-1)
    check_details(expected[0], 4, found[0], 2)
    check_details(expected[2], 9, found[2], 2)


def test_equal_logits_share_a_rank():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    (found,) = report(scores_of(logits), scores_of(logits), [2], [1], [0])
    assert found.rank == 1
    (found,) = report(scores_of(logits), scores_of(logits), [0], [1], [0])
    assert found.rank == 3


def test_more_tokens_than_the_vocabulary_has_are_all_of_them():
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    (found,) = report(scores_of(logits), scores_of(logits), [2], [20], [0])
    assert found.top_token_ids == (1, 0, 2)


class _Model:
    """A head of a model: logits are a function of the hidden state alone."""

    def __init__(self) -> None:
        self.config = type("Config", (), {"vocab_size": VOCAB_SIZE})
        self.weight = torch.randn((8, VOCAB_SIZE), generator=torch.Generator().manual_seed(1))
        self.num_rows: list[int] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_rows.append(len(hidden))
        return hidden @ self.weight


def chunk_of(num_tokens, targets, num_top):
    return ScheduledChunk(
        0, (0,) * num_tokens, 0, prompt_targets=targets, num_prompt_logprobs=num_top
    )


def test_prompts_are_reported_in_slices(monkeypatch):
    monkeypatch.setattr(module, "_PART_ELEMENTS", 2 * VOCAB_SIZE)
    chunks = (
        chunk_of(5, (1, 2, 3, 4, 5), 3),
        chunk_of(2, (), 0),
        chunk_of(4, (9, 8, 7), 0),
    )
    model, hidden = _Model(), torch.randn((12, 8))
    prompts = PromptTokens(ScheduledBatch(1, chunks))
    found = prompts.read(prompts.compute(model, hidden))
    assert model.num_rows == [2, 2, 1, 2, 1]
    assert [len(details) for details in found] == [5, 0, 3]
    expected = (hidden @ model.weight).double().log_softmax(-1)
    for first, chunk, details in zip((0, 5, 7), chunks, found, strict=True):
        for index, (target, one) in enumerate(zip(chunk.prompt_targets, details, strict=True)):
            check_details(expected[first + index], target, one, chunk.num_prompt_logprobs)


def test_prompts_that_ask_for_nothing_compute_nothing():
    prompts, model = PromptTokens(ScheduledBatch(1, (chunk_of(5, (), 0),))), _Model()
    assert prompts.read(prompts.compute(model, None)) == ()
    assert model.num_rows == []
