"""Requests into the engine and outputs out of it: frozen plain data. Pure."""

from dataclasses import dataclass, replace
from enum import Enum

from baton.errors import BatonError
from engine.batch import DrawParams
from kvstore.handoff import KvHandoff

__all__ = [
    "BeamSearchParams",
    "CandidateProgress",
    "EngineLoad",
    "EngineRequest",
    "FinishReason",
    "RequestOutput",
    "StageTimings",
    "candidate_seed",
]

_MASK64 = 2**64 - 1


class FinishReason(Enum):
    """Why a candidate, or with it its request, ended.

    HANDOFF: prefill's part is done, decode goes on. IGNORED: the request can
    never fit the KV pool.
    """

    STOP = "stop"
    LENGTH = "length"
    HANDOFF = "handoff"
    ABORTED = "aborted"
    IGNORED = "ignored"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CandidateProgress:
    """A candidate that is not finished, as another replica left it.

    Attributes:
        index: its number.
        output_token_ids: tokens generated so far, one or more.
        logprob: sum of their log-probabilities; counts where candidates are ranked.
    """

    index: int
    output_token_ids: tuple[int, ...]
    logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam search; `EngineRequest.num_candidates` is the beam width.

    Attributes:
        length_penalty: a hypothesis' score is the sum of its tokens'
            log-probabilities over its length to this power.
        early_stopping: True: stop at the first `num_candidates` finished
            hypotheses; False: when the best running beam cannot do better, as
            far as its present length tells; "never": when none ever could.
    """

    length_penalty: float = 1.0
    early_stopping: bool | str = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt for the engine.

    Attributes:
        request_id: unique among the engine's live requests.
        prompt_token_ids: the prompt, not empty.
        draw: how tokens are drawn. Candidate 0 draws with its seed, candidate
            i with `candidate_seed(draw.seed, i)`.
        max_tokens: the most tokens to generate per candidate, those of
            `progress` included. A prefill engine generates one whatever this says.
        num_candidates: sequences generated: OpenAI's best_of, or the beam width.
        num_returned: the best this many of them are returned. Where it is less
            than `num_candidates`, and in beam search, candidates are *ranked*:
            their tokens come when all have ended.
        beam_search: search with beams instead of drawing.
        progress: the unfinished candidates, where generation goes on after
            tokens of prefill or of a replica that was lost. Empty: it begins.
        first_beams: beam search that goes on after prefill: its most likely
            first tokens with their log-probabilities.
        stop_token_ids: ids that end the generation, end-of-sequence included.
        priority: larger is scheduled first.
        cache_salt: separates prefix caches.
        handoff: where the prompt's KV is; None to compute what is not cached.
        deadline: `time.monotonic()` after which the request is ended with
            `DeadlineExceededError`; None for none.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    draw: DrawParams
    max_tokens: int
    num_candidates: int = 1
    num_returned: int = 1
    beam_search: BeamSearchParams | None = None
    progress: tuple[CandidateProgress, ...] = ()
    first_beams: tuple[tuple[int, float], ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    handoff: KvHandoff | None = None
    deadline: float | None = None

    @property
    def is_ranked(self) -> bool:
        """Whether candidates are compared, and the best returned when all have ended."""
        return self.beam_search is not None or self.num_returned < self.num_candidates

    @property
    def has_begun(self) -> bool:
        """Whether another replica has generated tokens already."""
        return bool(self.progress or self.first_beams)

    def draw_of(self, index: int) -> DrawParams:
        """How candidate `index` draws."""
        return (
            replace(self.draw, seed=candidate_seed(self.draw.seed, index)) if index else self.draw
        )


def candidate_seed(seed: int, index: int) -> int:
    """The seed that candidate `index` of a request draws with; its own for candidate 0.

    SplitMix64's output function (Steele et al. 2014) of the request's seed
    plus `index` times its increment: the candidates' seeds differ from each
    other, whatever seeds requests have.
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)


@dataclass(frozen=True, slots=True)
class StageTimings:
    """Where a request's time went on this engine, in milliseconds.

    `transfer_ms` is from the first token to the last block committed;
    `load_ms` from arrival to the last block loaded.
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    load_ms: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """New tokens of one candidate, or its end. At most one per candidate and step.

    Nobody changes it. It is not frozen, because one is made per token, and
    freezing makes that six times as slow.

    Attributes:
        request_id: whose it is.
        index: the candidate's number.
        token_ids: tokens drawn since the candidate's last output, in order; all
            of them where candidates are ranked. Of a request that will be handed
            over: the first token of every candidate, by index; in beam search the
            most likely first tokens, the likeliest first.
        finish_reason: set on the candidate's last output.
        is_last: the request's last output: it ends all candidates that have
            not ended.
        error: set where `finish_reason` is ERROR or IGNORED.
        score: what a ranked candidate was ranked by: beam search's score, or
            the mean log-probability of its tokens. On its last output.
        logprobs: of `token_ids`, where candidates are ranked and the request will be handed over.
        cached_tokens: prompt tokens not computed here but found or loaded. On the
            request's first output and on its candidates' last ones; else 0.
        timings: set on the request's first output that carries tokens and on its last.
        handoff: set where `finish_reason` is HANDOFF, unless the connector did
            not take every block: decode must then compute the prompt itself.
        saved: full blocks of the prompt that decode can load already, those
            since the last output that told of any; such an output tells of
            nothing else.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    is_last: bool = False
    error: BatonError | None = None
    score: float | None = None
    logprobs: tuple[float, ...] = ()
    cached_tokens: int = 0
    timings: StageTimings | None = None
    handoff: KvHandoff | None = None
    saved: KvHandoff | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        num_running: sequences in the running batch.
        num_waiting: requests waiting for admission, preempted and loading ones included.
        num_queued_tokens: tokens still to compute for prompts of running and
            waiting requests.
        num_free_blocks: blocks that nobody holds, cached ones included.
        num_blocks: blocks in the pool.
        draining: whether new requests are refused.
        prefix_cache_queries: prompt tokens looked up in the prefix cache since the start.
        prefix_cache_hits: of these, the tokens found.
        num_preemptions: running requests preempted since the start.
        num_swapped_blocks: blocks in the host pool now.
    """

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_free_blocks: int
    num_blocks: int
    draining: bool = False
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_swapped_blocks: int = 0
