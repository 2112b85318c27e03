"""The tags of the reasoning part of a text: from the operator's texts to a request's tokens.

The router and `LLM` use it.
"""

from baton.common.errors import ConfigurationError, FailedPreconditionError, Reason
from baton.common.request.request_spec import ReasoningMarks
from baton.common.request.sampling_params import SamplingParams
from router.requests.tokenizer import Tokenizer

__all__ = ["encode_marks", "marks_for"]

_FLAGS = "--reasoning-start-str and --reasoning-end-str"


def encode_marks(
    tokenizer: Tokenizer, start_str: str | None, end_str: str | None
) -> ReasoningMarks | None:
    """Returns the tokens of the tags; None if both texts are None.

    Raises:
        ConfigurationError: one text alone is set, or a text is empty or has characters that
            the vocabulary lacks; names the flag.
    """
    if start_str is None and end_str is None:
        return None
    if start_str is None or end_str is None:
        raise ConfigurationError(f"one of {_FLAGS} is set alone; set both or none")
    return ReasoningMarks(
        start_token_ids=_encoded(tokenizer, "--reasoning-start-str", start_str),
        end_token_ids=_encoded(tokenizer, "--reasoning-end-str", end_str),
    )


def marks_for(
    params: SamplingParams, marks: ReasoningMarks | None, vocab_size: int
) -> ReasoningMarks | None:
    """Returns the tags that a request needs: None if it does not depend on a reasoning part.

    Args:
        params: the request's.
        marks: those of the model, if they are known.
        vocab_size: number of tokens that the model has logits for.

    Raises:
        FailedPreconditionError: the request limits the reasoning part, and no tags are known,
            or the model has no logits for a token of a tag.
    """
    budget = params.thinking_token_budget
    if budget is None and params.structured_outputs is None:
        return None
    if marks is None:
        if budget is not None:
            raise FailedPreconditionError(
                f"thinking_token_budget is {budget}, but no tags of a reasoning part are "
                f"configured; the operator must set {_FLAGS}",
                reason=Reason.NOT_CONFIGURED,
            )
        return None
    largest = max(*marks.start_token_ids, *marks.end_token_ids)
    if largest >= vocab_size:
        raise FailedPreconditionError(
            f"{_FLAGS} have the token {largest}, which the model, with {vocab_size} tokens, lacks",
            reason=Reason.NOT_CONFIGURED,
        )
    return marks


def _encoded(tokenizer: Tokenizer, flag: str, text: str) -> tuple[int, ...]:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(token_ids, skip_special_tokens=False)
    # Some vocabularies have a token for unknown characters. Some decoders change spaces.
    if not token_ids or "".join(decoded.split()) != "".join(text.split()):
        raise ConfigurationError(
            f"{flag} is {text!r}; it must be a text that the model's vocabulary can write"
        )
    return tuple(token_ids)
