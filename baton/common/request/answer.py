"""`CandidateOutput`: new tokens of one candidate, from the worker to the client's protocol.
`JoinedAnswer`: the outputs of one request, for answers that come whole.

The router reads an output from each message of a worker, `LLM` from each output of its engine.
`Completion` adds the text, a chat its parts, and the client's protocol is written from it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.common.request.results import Logprobs, Timings, logprobs_of

__all__ = [
    "NO_DELTA",
    "CandidateOutput",
    "ChatDelta",
    "JoinedAnswer",
    "JoinedCandidate",
    "TokenCounts",
    "TokenLogprobs",
    "ToolCallDelta",
    "logprobs_by_token",
    "prompt_logprobs_by_token",
    "stated_stop",
]


class TokenLogprobs(Protocol):
    """The log-probabilities at the place of one token; `baton.v1.TokenLogprobs` is such a form."""

    @property
    def logprob(self) -> float:
        """The token's own."""

    @property
    def rank(self) -> int:
        """The token's rank in the vocabulary; the likeliest token has 1."""

    @property
    def top_token_ids(self) -> Sequence[int]:
        """The likeliest tokens, the likeliest first."""

    @property
    def top_logprobs(self) -> Sequence[float]:
        """Their log-probabilities."""


@dataclass
class TokenCounts:
    """Token counts of one request, which grow while it runs.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them whose KV was found instead of computed.
        completion_tokens: generated tokens.
        accepted_prediction_tokens: those of them that a worker had drafted.
        rejected_prediction_tokens: drafted tokens that were wrong.
        reasoning_tokens: tokens of `completion_tokens` that belong to the reasoning part of a chat.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of one tool call.

    Attributes:
        index: the call's number in the answer, from 0.
        id: the call's id; on its first delta only.
        name: the function's name; on its first delta only.
        arguments: further text of the arguments' JSON.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """New text of an answer, by its part. All parts may be empty."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


NO_DELTA = ChatDelta()


@dataclass(slots=True)
class CandidateOutput:
    """New tokens of one candidate, or its end.

    The stages of a request fill it in, one after the other. The class is not frozen, because one
    output is made per message and a frozen dataclass takes six times as long to make.

    Attributes:
        index: the candidate's number, from 0; the rank of a ranked candidate.
        token_ids: tokens since the candidate's last output.
        finish_reason: "stop", "length" or "abort", and "tool_calls" in chats; set on the
            candidate's last output.
        is_last: whether this is the last output of a worker for the request. It ends all
            candidates that have not ended.
        logprobs: one per token, if the request asks for them.
        score: the score of a ranked candidate, on its last output.
        accepted_drafts: draft tokens of a worker that were right.
        rejected_drafts: draft tokens that were wrong.
        cached_tokens: prompt tokens whose KV a worker found or loaded; on its first output.
        stages: the worker's own times; on its first output, and once the prompt's KV is saved.
        prompt_logprobs: one per token of the prompt after the first, if the request asks for them;
            on the first output.
        request_id: the client's name for the request.
        text: text since the candidate's last output. It may lag behind `token_ids` while a
            character or a stop text is incomplete.
        matched_stop: the stop text, or the id of the stop or end-of-sequence token, that ended the
            candidate.
        prompt_token_ids: the prompt, if the request asks for `prompt_logprobs`; on the first
            output.
        prompt_usage: the counts of the prompt; on the first output.
        usage: token counts; on the last output of all.
        timings: time per stage; on the last output of all.
        prompt_index: the number of the prompt, from 0, if the request has several.
        delta: the parts of `text` in a chat.
    """

    index: int = 0
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    is_last: bool = False
    logprobs: Sequence[TokenLogprobs] = ()
    score: float | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    cached_tokens: int = 0
    stages: Timings | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    request_id: str = ""
    text: str = ""
    matched_stop: str | int | None = None
    prompt_token_ids: Sequence[int] = ()
    prompt_usage: TokenCounts | None = None
    usage: TokenCounts | None = None
    timings: Timings | None = None
    prompt_index: int = 0
    delta: ChatDelta = NO_DELTA


@dataclass(slots=True)
class JoinedCandidate:
    """Outputs of one candidate, joined.

    Attributes:
        index: its number.
        token_ids: their tokens.
        logprobs: the log-probabilities of these, if the request asks for them.
        texts: their texts, one per output.
        deltas: the parts of these in a chat.
        last: the last output; it says whether and why the candidate ended.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    deltas: list[ChatDelta] = field(default_factory=list)
    last: CandidateOutput = field(default_factory=CandidateOutput)

    def add(self, output: CandidateOutput) -> None:
        """Adds the next output."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.texts.append(output.text)
        self.deltas.append(output.delta)
        self.last = output


class JoinedAnswer:
    """Outputs of one request, joined.

    Args:
        num_candidates: candidates that are listed even without an output.

    Attributes:
        first: the output that has the prompt, if it came.
        last: the last output; the last of all has usage and timings.
    """

    def __init__(self, num_candidates: int = 0) -> None:
        self.first = self.last = CandidateOutput()
        self._candidates = {index: JoinedCandidate(index) for index in range(num_candidates)}

    @property
    def candidates(self) -> list[JoinedCandidate]:
        """The candidates by index."""
        return [self._candidates[index] for index in sorted(self._candidates)]

    def add(self, output: CandidateOutput) -> None:
        """Adds the next output."""
        candidate = self._candidates.get(output.index)
        if candidate is None:
            candidate = self._candidates[output.index] = JoinedCandidate(output.index)
        candidate.add(output)
        if output.prompt_usage is not None:
            self.first = output
        self.last = output


def logprobs_by_token(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs],
    text_of: Callable[[int], str] | None = None,
) -> list[Logprobs]:
    """The public form of the log-probabilities of tokens; `text_of` returns a token's text."""
    return [
        logprobs_of(token_id, at.logprob, at.rank, at.top_token_ids, at.top_logprobs, text_of)
        for token_id, at in zip(token_ids, entries, strict=True)
    ]


def prompt_logprobs_by_token(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs],
    text_of: Callable[[int], str] | None = None,
) -> list[Logprobs | None] | None:
    """The same for a prompt, whose first token has none. None if the request did not ask for them
    or ended before they were computed.
    """
    later = token_ids[1:]
    if not token_ids or len(later) != len(entries):
        return None
    return [None, *logprobs_by_token(later, entries, text_of)]


def stated_stop(stop: str | int | None, stop_token_ids: Collection[int] | None) -> str | int | None:
    """The stop of a request that ended a candidate: a text, or one of its stop tokens. None if
    the model's own end-of-sequence token did.

    Args:
        stop: what ended the candidate.
        stop_token_ids: the request's.
    """
    is_own_end = isinstance(stop, int) and stop not in (stop_token_ids or ())
    return None if is_own_end else stop
