"""`RequestSpec`: everything that a request asks of an engine.

The router, or `LLM`, makes one spec per request. It goes to workers whole
(`baton.common.request.spec_wire`) and engines use it as it is. A leaf module like
`baton.common.request.sampling_params`.
"""

import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from baton.common.errors import DeadlineExceededError, Reason
from baton.common.request.sampling_params import SamplingParams

__all__ = [
    "ReasoningMarks",
    "ReasoningStart",
    "RequestSpec",
    "client_id_of",
    "unique_request_id",
]

_UNIQUE_ID = re.compile(r"(?P<client>.*)/[0-9a-f]{16}(/[0-9]+)?", re.DOTALL)


class ReasoningStart(Enum):
    """The start of a generated text, relative to its reasoning part.

    Attributes:
        BY_PROMPT: as the last tag in the prompt says; before the part if there is none.
        INSIDE: inside of the part, which the prompt has opened.
        AFTER: after the part.
        BEFORE: before the part, which exists only if the text begins with its start tag.
    """

    BY_PROMPT = 0
    INSIDE = 1
    AFTER = 2
    BEFORE = 3


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The tokens around the part of a text in which a model reasons before it answers.

    Attributes:
        start_token_ids: the tokens of the tag at its start, such as `<think>`.
        end_token_ids: the tokens of the tag at its end, such as `</think>`; not empty.
        start: where the generated text begins.
    """

    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    start: ReasoningStart = ReasoningStart.BY_PROMPT


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One prompt to complete, and how.

    Attributes:
        request_id: unique among the engine's live requests; see `unique_request_id`.
        prompt_token_ids: the prompt, not empty.
        params: how tokens are drawn and when to stop; `seed` is set.
        stop_token_ids: token ids that end a candidate: those of `params` and, unless
            `params.ignore_eos`, the model's end-of-sequence ids.
        priority: lower is scheduled first.
        cache_salt: separates prefix caches.
        deadline: `time.monotonic()` of this process at which the request must have
            ended; None for no deadline. Workers receive the time that is left.
        bad_words_token_ids: the token sequences of `params.bad_words`, none of them empty.
        reasoning: the tags of the reasoning part, if `params.structured_outputs` or
            `params.thinking_token_budget` depends on it; None: the text has no such part.
        traceparent: the sender's span, as W3C's header; empty if the request is not traced.
        prediction_token_ids: the tokens of `params.prediction`, whose text workers do not get.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    reasoning: ReasoningMarks | None = None
    traceparent: str = ""
    prediction_token_ids: tuple[int, ...] = ()

    @classmethod
    def with_defaults(
        cls,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        eos_token_ids: Iterable[int],
        priority: int = 0,
        cache_salt: str = "",
        deadline: float | None = None,
        bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
        reasoning: ReasoningMarks | None = None,
        prediction_token_ids: tuple[int, ...] = (),
    ) -> "RequestSpec":
        """Makes a spec from a user's parameters.

        A missing seed is drawn here, so that every replica that continues the request uses
        the same random noise. Greedy decoding uses no noise and gets seed 0.

        Args:
            request_id: unique among the engine's live requests.
            prompt_token_ids: the prompt.
            params: the user's; `seed` may be None.
            eos_token_ids: the model's end-of-sequence ids.
            priority: lower is scheduled first.
            cache_salt: separates prefix caches.
            deadline: when the request must have ended.
            bad_words_token_ids: the token sequences of `params.bad_words`.
            reasoning: the tags of the reasoning part, if the request depends on it.
            prediction_token_ids: the tokens of `params.prediction`.
        """
        if params.seed is None:
            params = params.with_seed(secrets.randbits(64) if params.temperature > 0 else 0)
        eos_stops = () if params.ignore_eos else eos_token_ids
        return cls(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            stop_token_ids=frozenset((*params.stop_token_ids, *eos_stops)),
            priority=priority,
            cache_salt=cache_salt,
            deadline=deadline,
            bad_words_token_ids=bad_words_token_ids,
            reasoning=reasoning,
            prediction_token_ids=prediction_token_ids,
        )

    @property
    def client_id(self) -> str:
        """The client's name for the request."""
        return client_id_of(self.request_id)

    @property
    def max_total_tokens(self) -> int:
        """The most prompt and generated tokens of one candidate."""
        return len(self.prompt_token_ids) + self.params.max_tokens

    def for_attempt(self, attempt: int, traceparent: str = "") -> "RequestSpec":
        """The spec that the router sends on its n-th attempt, counted from 0.

        A repeat gets an id of its own: the worker that was tried before may still send
        outputs under the earlier id.

        Args:
            attempt: the number.
            traceparent: the span of the attempt; empty if the request is not traced.
        """
        if attempt == 0 and not traceparent:
            return self
        request_id = f"{self.request_id}/{attempt}" if attempt else self.request_id
        return replace(self, request_id=request_id, traceparent=traceparent)

    def remaining_s(self) -> float:
        """Seconds until the deadline, which must be set.

        Raises:
            DeadlineExceededError: the deadline has passed.
        """
        assert self.deadline is not None, "a request between tiers has a deadline"
        remaining_s = self.deadline - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceededError(
                f"request {self.client_id} exceeded its deadline", reason=Reason.REQUEST_DEADLINE
            )
        return remaining_s


def unique_request_id(client_id: str) -> str:
    """A request id that was never used before: the client's id, a slash, 16 random hex digits."""
    return f"{client_id}/{secrets.token_hex(8)}"


def client_id_of(request_id: str) -> str:
    """The client's part of a unique request id; any other id is returned unchanged."""
    match = _UNIQUE_ID.fullmatch(request_id)
    return match["client"] if match else request_id
