"""The results of `Client`, `AsyncClient` and `LLM`: frozen plain data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

__all__ = [
    "STAGES",
    "CompletionChunk",
    "CompletionOutput",
    "Logprob",
    "Logprobs",
    "ModelDescription",
    "RequestMetrics",
    "RequestOutput",
    "Timings",
    "Usage",
    "logprobs_of",
]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them whose KV was found instead of computed.
        completion_tokens: generated tokens.
        accepted_prediction_tokens: those of them that a worker with `--speculative-config` had
            drafted.
        rejected_prediction_tokens: its draft tokens that were wrong.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """The time that each stage of a request took, in milliseconds.

    `baton.v1.Timings` documents the stages. A stage that the request skipped is 0.
    """

    route_ms: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    load_ms: float = 0.0
    first_token_ms: float = 0.0
    decode_ms: float = 0.0
    total_ms: float = 0.0
    wait_ms: float = 0.0


STAGES = tuple(stage.name for stage in fields(Timings))
"""The names of the fields of `Timings`."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token at some place.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: the token's rank in the vocabulary; the likeliest token has 1.
        decoded_token: the token's text; None in results of a server, which has the texts, and
            without `SamplingParams.detokenize`.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]
"""Log-probabilities at the place of one token, by token id: the token's own first, then those
of the likeliest tokens, the likeliest first. The token may be one of these."""


def logprobs_of(
    token_id: int,
    logprob: float,
    rank: int,
    top_token_ids: Sequence[int],
    top_logprobs: Sequence[float],
    text_of: Callable[[int], str] | None = None,
) -> Logprobs:
    """Returns the log-probabilities at the place of a token.

    Args:
        token_id: the token.
        logprob: its own log-probability.
        rank: its rank.
        top_token_ids: the likeliest tokens, the likeliest first.
        top_logprobs: their log-probabilities.
        text_of: returns a token's text; None leaves texts out.
    """
    pairs = {token_id: (logprob, rank)}
    for top_rank, (top_id, top_logprob) in enumerate(
        zip(top_token_ids, top_logprobs, strict=True), 1
    ):
        pairs.setdefault(top_id, (top_logprob, top_rank))
    return {
        each_id: Logprob(*pair, text_of(each_id) if text_of else None)
        for each_id, pair in pairs.items()
    }


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One candidate. The names are those of vLLM's class, besides `score`.

    Attributes:
        index: the candidate's number, from 0.
        text: the text of the tokens, cut before a matched stop text.
        token_ids: every generated token, the stopping one included.
        finish_reason: "stop", "length" or "abort". `LLM` also uses "ignored": the prompt can
            never fit the KV pool. None: the candidate has not ended (`AsyncLLM`).
        stop_reason: the stop text, or the id of the stop or end-of-sequence
            token, that ended it; None otherwise, also for a text that ended because its
            structured output was complete.
        score: the score of a ranked candidate: that of beam search, or the mean
            log-probability per token. None if candidates were not ranked.
        logprobs: one per token; None if the request did not ask for them.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    score: float | None = None
    logprobs: list[Logprobs] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' own log-probabilities; None without `logprobs`."""
        if self.logprobs is None:
            return None
        pairs = zip(self.logprobs, self.token_ids, strict=True)
        return sum(logprobs[token_id].logprob for logprobs, token_id in pairs)

    def finished(self) -> bool:
        """Whether the candidate has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds, under vLLM's names. `Timings` has every stage.

    Attributes:
        num_generation_tokens: tokens of all candidates.
        time_in_queue: from arrival to the first step.
        first_token_latency: from arrival to the first token.
    """

    num_generation_tokens: int
    time_in_queue: float
    first_token_latency: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's result. `text`, `token_ids`, `finish_reason` and `stop_reason` are those of
    its first candidate. The other names are those of vLLM's class, besides `usage` and
    `timings`.

    Attributes:
        request_id: the request's name.
        outputs: the candidates by index; ranked candidates come best first.
        usage: token counts.
        timings: time per stage.
        prompt: the prompt's text; None if it was given as token ids.
        prompt_token_ids: the prompt; None if it was sent to a server as text and
            `prompt_logprobs` is None.
        prompt_logprobs: one per token of the prompt, but None for the first one; None if
            the request did not ask for them.
        finished: whether the request has ended. Only `AsyncLLM` returns unfinished ones.
    """

    request_id: str
    outputs: list[CompletionOutput]
    usage: Usage
    timings: Timings
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    finished: bool = True

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose KV was found instead of computed."""
        return self.usage.cached_tokens

    @property
    def metrics(self) -> RequestMetrics:
        """The request's times."""
        return RequestMetrics(
            num_generation_tokens=self.usage.completion_tokens,
            time_in_queue=self.timings.queue_ms / 1000,
            first_token_latency=self.timings.first_token_ms / 1000,
        )

    @property
    def text(self) -> str:
        """The first candidate's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first candidate's tokens."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first candidate ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop that ended the first candidate."""
        return self.outputs[0].stop_reason


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """New tokens of one candidate, or its end.

    Attributes:
        request_id: the request's name.
        index: the candidate's number, from 0.
        text: text since the candidate's previous chunk. It lags behind `token_ids`
            while a character or a stop text is incomplete.
        token_ids: tokens since the candidate's previous chunk.
        finish_reason: set on the candidate's last chunk.
        stop_reason: as in `CompletionOutput`; on the candidate's last chunk.
        usage: token counts; on the last chunk of all.
        timings: time per stage; on the last chunk of all.
        score: as in `CompletionOutput`; on the candidate's last chunk.
        logprobs: one per entry of `token_ids`; None if there are no tokens, or the request
            did not ask for them.
        prompt_token_ids: the prompt; on the first chunk, if the request asks for
            `prompt_logprobs`.
        prompt_logprobs: as in `RequestOutput`; on the first chunk.
        prompt_index: the number of the prompt, from 0, if the request has several. What is said
            of a first and a last chunk holds for each prompt's.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    score: float | None = None
    logprobs: list[Logprobs] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    prompt_index: int = 0


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The served model.

    Attributes:
        name: the name that requests use.
        max_model_len: the most tokens of a prompt and its completion together.
        vocab_size: token ids are below it.
        eos_token_ids: ids that end a generation unless `ignore_eos` is set.
        block_size: tokens in one KV block.
        namespace: hex digest of everything KV bytes depend on.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    namespace: str
