"""What `transformers`' models generate under logit rules, one token after another."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers

from engine.draw_params import DrawParams
from engine.request import EngineRequest
from engine.runtime.draws.sampler import draw_record, draw_table
from kernels import DRAW_RECORD, reference
from tests.support.checkpoints import reference_model
from tests.support.rule_cases import expected_logits

__all__ = ["by_oracle", "by_transformers", "generate"]

Choose = Callable[[torch.Tensor, Sequence[int]], int]
"""Returns the next token. Arguments: `[vocab]` logits and the sequence's tokens."""


def generate(
    path: Path,
    request: EngineRequest,
    choose: Choose,
    is_complete: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Returns the tokens that follow the request's prompt, up to a stop token or until they are
    complete.
    """
    prompt, drawn = list(request.spec.prompt_token_ids), []
    while len(drawn) < request.spec.params.max_tokens:
        drawn.append(choose(_logits(path, tuple(prompt + drawn)), prompt + drawn))
        if drawn[-1] in request.spec.stop_token_ids or is_complete():
            break
    return drawn


@cache
def _logits(path: Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Returns the logits of the token after `token_ids`, `[vocab]` float32."""
    with torch.inference_mode():
        return reference_model(path)(torch.tensor([token_ids])).logits[0, -1].float()


def by_transformers(request: EngineRequest) -> Choose:
    """Returns the greedy choice after `transformers`' own processors of logits."""
    params, spec = request.spec.params, request.spec
    processors = transformers.LogitsProcessorList()
    if params.logit_bias:
        biases = {(token,): bias for token, bias in params.logit_bias.items()}
        processors.append(transformers.SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
    if spec.bad_words_token_ids:
        words = [list(word) for word in spec.bad_words_token_ids]
        processors.append(transformers.NoBadWordsLogitsProcessor(words))
    if params.min_tokens:
        processors.append(
            transformers.MinNewTokensLengthLogitsProcessor(
                len(spec.prompt_token_ids), params.min_tokens, sorted(spec.stop_token_ids)
            )
        )

    def choose(logits: torch.Tensor, tokens: Sequence[int]) -> int:
        return int(processors(torch.tensor([tokens]), logits.unsqueeze(0).clone()).argmax())

    return choose


def by_oracle(request: EngineRequest, index: int = 0) -> Choose:
    """Returns how candidate `index` chooses after the oracle's changes of the logits."""
    (draw,) = DrawParams.of_candidates(request.spec, (index,))
    cpu = torch.device("cpu")

    def choose(logits: torch.Tensor, tokens: Sequence[int]) -> int:
        if draw.rules is not None:
            logits = expected_logits(logits, draw.rules, list(tokens)).float()
        rows = logits.unsqueeze(0)
        table = draw_table(np.array([draw_record(draw)], DRAW_RECORD), cpu)
        zero, position = torch.zeros(1, dtype=torch.int64), torch.tensor([len(tokens)])
        maxima, likeliest = reference.row_maxima(rows)
        drawn = reference.draw_tokens(
            rows, maxima, likeliest, table, draw_ids=zero, positions=position
        )
        return int(drawn)

    return choose
