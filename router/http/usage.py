"""`UsageCount`: the token counts of an answer, as OpenAI's API has them."""

from typing import Any

from baton.common.request.answer import TokenCounts

__all__ = ["UsageCount", "usage_fields"]


def usage_fields(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
    predicted: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """OpenAI's `usage`.

    Args:
        prompt_tokens: tokens of the prompt.
        completion_tokens: generated tokens.
        cached_tokens: those of the prompt whose KV was found; None to leave them out.
        reasoning_tokens: generated tokens of the reasoning; None to leave them out.
        predicted: the draft tokens of workers that were right, and those that were wrong; left out
            if there were none.
    """
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    details: dict[str, int] = {}
    if reasoning_tokens is not None:
        details["reasoning_tokens"] = reasoning_tokens
    if any(predicted):
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = predicted
    if details:
        usage["completion_tokens_details"] = details
    return usage


class UsageCount:
    """Sums the counts of several prompts.

    Args:
        counts_completion: whether generated tokens count; they do not if the client gets none.
    """

    def __init__(self, counts_completion: bool = True) -> None:
        self._counts_completion = counts_completion
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._num_accepted = self._num_rejected = 0  # of draft tokens

    def add(self, usage: TokenCounts) -> None:
        """Adds the counts of one prompt."""
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens
        if self._counts_completion:
            self._completion_tokens += usage.completion_tokens
            self._num_accepted += usage.accepted_prediction_tokens
            self._num_rejected += usage.rejected_prediction_tokens

    def fields(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return usage_fields(
            self._prompt_tokens,
            self._completion_tokens,
            self._cached_tokens,
            predicted=(self._num_accepted, self._num_rejected),
        )
