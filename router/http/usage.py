"""`UsageCount`: the token counts of an answer, as OpenAI's API has them."""

from typing import Any

from baton.common.request.answer import TokenCounts

__all__ = ["UsageCount", "usage_fields"]


def usage_fields(
    counts: TokenCounts, *, has_cached: bool = True, has_reasoning: bool = False
) -> dict[str, Any]:
    """OpenAI's `usage`. Draft tokens are left out if there were none.

    Args:
        counts: the counts.
        has_cached: whether it has the tokens of the prompt whose KV was found.
        has_reasoning: whether it has the generated tokens of the reasoning.
    """
    usage: dict[str, Any] = {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
    if has_cached:
        usage["prompt_tokens_details"] = {"cached_tokens": counts.cached_tokens}
    details: dict[str, int] = {}
    if has_reasoning:
        details["reasoning_tokens"] = counts.reasoning_tokens
    if counts.accepted_prediction_tokens or counts.rejected_prediction_tokens:
        details["accepted_prediction_tokens"] = counts.accepted_prediction_tokens
        details["rejected_prediction_tokens"] = counts.rejected_prediction_tokens
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
        self._sum = TokenCounts()

    def add(self, usage: TokenCounts) -> None:
        """Adds the counts of one prompt."""
        self._sum.prompt_tokens += usage.prompt_tokens
        self._sum.cached_tokens += usage.cached_tokens
        if self._counts_completion:
            self._sum.completion_tokens += usage.completion_tokens
            self._sum.accepted_prediction_tokens += usage.accepted_prediction_tokens
            self._sum.rejected_prediction_tokens += usage.rejected_prediction_tokens

    def fields(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return usage_fields(self._sum)
