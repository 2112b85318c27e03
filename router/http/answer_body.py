"""`AnswerBody`: the fields that bodies of the Responses API and of Anthropic's API share."""

from typing import Any

from baton.common.errors import InvalidArgumentError
from router.http.bodies import Array, JsonObject, SamplingBody
from router.http.params import stated_fields

__all__ = ["AnswerBody", "sampling_of"]

_HAVE_NO_PLACE = ("use_beam_search", "prompt_logprobs", "echo", "return_token_ids")
_ONE_ANSWER = ("n", "best_of")


class AnswerBody(SamplingBody):
    """A request for one answer to a conversation, with vLLM's further fields.

    Attributes:
        chat_template_kwargs: further variables of the chat template.
        documents: documents for templates that read them.
    """

    chat_template_kwargs: JsonObject | None = None
    documents: Array[JsonObject] | None = None


def sampling_of(body: AnswerBody) -> dict[str, Any]:
    """Returns the stated sampling parameters.

    Raises:
        InvalidArgumentError: a field is set that Baton lacks, or for which the API's answers
            have no place; names it.
    """
    for name in _ONE_ANSWER:
        if getattr(body, name) not in (None, 1):
            raise InvalidArgumentError.for_field(name, getattr(body, name), "1 in this API")
    for name in _HAVE_NO_PLACE:
        if getattr(body, name) not in (None, False):
            raise InvalidArgumentError(
                f"{name} is set, but answers of this API have no place for it"
            )
    return stated_fields(body)
