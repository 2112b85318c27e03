"""Measures how many draft tokens of a draft head the served model would accept."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from draft_heads import DraftHead, run_served
from transformers import GenerationConfig, LlamaForCausalLM

__all__ = ["NUM_PLACES", "Acceptance", "Continuations", "continue_texts", "measure_acceptance"]

NUM_PLACES = 4


@dataclass(frozen=True)
class Continuations:
    """Prompts of equal length, each with the tokens that the served model chose after it."""

    token_ids: torch.Tensor  # [texts, tokens]
    prompt_length: int
    eos_token_id: int

    def lengths(self) -> list[int]:
        """Returns how many tokens each text has before its end-of-sequence token."""
        is_eos = self.token_ids[:, self.prompt_length :] == self.eos_token_id
        lengths = (is_eos.cumsum(1) == 0).sum(1) + self.prompt_length
        return [int(length) for length in lengths]


@dataclass(frozen=True)
class Acceptance:
    """Rates of right draft tokens; `rates[k]` counts only cases where all earlier were right."""

    rates: list[float]
    mean_length: float  # right draft tokens in a row
    num_rounds: int


def continue_texts(
    served: LlamaForCausalLM, prompts: torch.Tensor, num_tokens: int, *, greedy: bool
) -> torch.Tensor:
    """Appends `num_tokens` of the served model's choice to each of `prompts` [texts, tokens].

    It goes on after the end of a text, as in its training.
    """
    # The checkpoint's own settings would end texts, and could change the distribution.
    served.generation_config = GenerationConfig(pad_token_id=0)
    sampling: dict[str, Any] = {} if greedy else {"do_sample": True, "top_k": 0}
    outputs: torch.Tensor = served.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=num_tokens, **sampling
    )
    return outputs


@torch.no_grad()
def measure_acceptance(
    head: DraftHead, served: LlamaForCausalLM, texts: Continuations, *, whole_text: bool
) -> Acceptance:
    """Measures the head on greedy continuations.

    The head attends to the whole text, or only to positions from the last prompt token on.
    """
    begins = torch.zeros_like(texts.token_ids)
    if not whole_text:
        begins[:, texts.prompt_length - 1 :] = texts.prompt_length - 1
    text = run_served(served, texts.token_ids, begins)
    draft_tokens = [
        head.vocabulary[logits.argmax(-1)][:, :-1] for logits in head.draft(text, NUM_PLACES)
    ]
    is_right = torch.stack([draft == texts.token_ids[:, 2:] for draft in draft_tokens], -1)
    lengths = [
        length
        for row, end in zip(is_right, texts.lengths(), strict=True)
        for length in _accepted_lengths(row, texts.prompt_length - 1, end)
    ]
    reached = [sum(length >= place for length in lengths) for place in range(NUM_PLACES + 1)]
    return Acceptance(
        rates=[reached[k + 1] / max(1, reached[k]) for k in range(NUM_PLACES)],
        mean_length=sum(lengths) / max(1, len(lengths)),
        num_rounds=len(lengths),
    )


def _accepted_lengths(is_right: torch.Tensor, position: int, end: int) -> Iterator[int]:
    """Yields the number of accepted draft tokens of each round, as in serving.

    After each round the served model itself adds a token, so the next begins one further.

    Args:
        is_right: whether the draft token at each place is right [positions, places].
        position: the last known position of the first round.
        end: the number of tokens; rounds whose draft tokens would reach it are left out.
    """
    while position + NUM_PLACES + 1 < end:
        length = 0
        while length < NUM_PLACES and is_right[position + length, length]:
            length += 1
        yield length
        position += length + 1
