"""`CompletionBody`: the body of `/v1/completions`."""

from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from baton.common.errors import InvalidArgumentError
from baton.common.request.generation import TextOrTokens
from router.http.bodies import Array, Integer, SamplingBody, TokenIds
from router.http.params import stated_fields
from router.requests.validation import MAX_PROMPTS

__all__ = ["CompletionBody"]


def _refuse_many(prompt: Any) -> Any:
    """Refuses too many prompts before each of them is checked."""
    if (
        isinstance(prompt, list)
        and len(prompt) > MAX_PROMPTS
        and not isinstance(prompt[0], int | float)
    ):
        raise PydanticCustomError(
            "too_many_prompts",
            "Field has {length} prompts; at most {most} are allowed",
            {"length": len(prompt), "most": MAX_PROMPTS},
        )
    return prompt


class CompletionBody(SamplingBody):
    """A request for completions.

    Attributes:
        prompt: a text, several texts, token ids, or several lists of them.
        logprobs: how many likeliest tokens are returned at each place, beside the token.
    """

    prompt: Annotated[str | Array[str] | TokenIds | Array[TokenIds], BeforeValidator(_refuse_many)]
    logprobs: Integer | None = None

    def prompts(self) -> list[TextOrTokens]:
        """The prompts, one by one.

        Raises:
            InvalidArgumentError: there is none, or one is empty.
        """
        given: Any = self.prompt
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        prompts: list[TextOrTokens] = [given] if is_one else given
        if not all(prompts) or not prompts:
            raise InvalidArgumentError("prompt is empty; it must have at least 1 token")
        return prompts

    @property
    def is_echo_alone(self) -> bool:
        """Whether the answer is the prompt, without generated text."""
        return bool(self.echo) and self.max_tokens == 0

    def stated(self) -> dict[str, Any]:
        """The stated fields of `SamplingParams`.

        An echo with log-probabilities needs those of the prompt. A candidate has at least one
        token, so an echo alone generates one too.

        Raises:
            InvalidArgumentError: a field is set that this server lacks, or excludes another one.
        """
        stated = stated_fields(self)
        if self.logprobs is not None:
            stated["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                stated["prompt_logprobs"] = self.logprobs
        if self.is_echo_alone:
            stated["max_tokens"] = 1
            stated.pop("min_tokens", None)
        return stated
