"""Requests to the engine and outputs from it: plain data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntFlag

from baton.common.errors import BatonError
from baton.common.request.request_spec import RequestSpec
from engine.batch import TokenLogprobs
from kvstore.handoff import KvHandoff

__all__ = [
    "CandidateProgress",
    "EngineLoad",
    "EngineOutput",
    "EngineRequest",
    "FinishReason",
    "PrefixRequest",
    "Role",
    "StageTimings",
]


class Role(IntFlag):
    """Which requests an engine takes. The values are those of `baton.v1.WorkerRole`.

    PREFILL: those whose KV it hands over.
    DECODE: those that it runs to their end.
    """

    PREFILL = 1
    DECODE = 2
    BOTH = PREFILL | DECODE

    @property
    def label(self) -> str:
        """prefill, decode or both."""
        return (self.name or "").lower()


class FinishReason(Enum):
    """Why a candidate ended, or why its whole request did.

    HANDOFF: this engine has finished its part, and another one continues.
    """

    STOP = "stop"
    LENGTH = "length"
    HANDOFF = "handoff"
    ABORTED = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CandidateProgress:
    """The tokens that another replica generated for an unfinished candidate.

    Attributes:
        index: the candidate's number.
        output_token_ids: tokens generated so far, one or more.
        logprob: sum of their log-probabilities; used if candidates are ranked.
        token_logprobs: one per token, if candidates are ranked and the request asks
            for them. Other candidates' have been returned with the tokens.
    """

    index: int
    output_token_ids: tuple[int, ...]
    logprob: float = 0.0
    token_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request for the engine, and where its generation starts.

    Attributes:
        spec: the request.
        hands_over: whether this engine computes only the prompt and one token of each candidate,
            whatever `spec.params.max_tokens` is, and hands its KV over.
        progress: the unfinished candidates, if generation continues after
            tokens of prefill or of a replica that was lost. Empty: it begins.
        first_beams: the most likely first tokens with their log-probabilities,
            of a beam search that continues after prefill.
        handoff: where the prompt's KV is; None to compute what is not cached.
        skips_lookup: whether not to look the prompt up in a KV store, for which the request has
            waited already.
        prefix: where leading blocks of the prompt are that another engine lends; not used if
            `handoff` is set. What cannot be loaded is computed, whatever the policy is.
    """

    spec: RequestSpec
    hands_over: bool = False
    progress: tuple[CandidateProgress, ...] = ()
    first_beams: tuple[tuple[int, float], ...] = ()
    handoff: KvHandoff | None = None
    skips_lookup: bool = False
    prefix: KvHandoff | None = None

    @property
    def has_begun(self) -> bool:
        """Whether another replica has generated tokens already."""
        return bool(self.progress or self.first_beams)


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """Another engine's wish to load the beginning of a prompt from this one's prefix cache.

    Attributes:
        lease_id: id of the handoff that it gets. The lease ends like that of any other handoff.
        keys: keys of the prompt's transfer blocks, as far as they are asked for.
        answer: called once on the engine's thread: with the handoff when the blocks can be
            loaded; with None if there are none, if they cannot be kept, or if the lease ended
            before.
    """

    lease_id: str
    keys: Sequence[bytes]
    answer: Callable[[KvHandoff | None], None]


@dataclass(frozen=True, slots=True)
class StageTimings:
    """The time that each stage of a request took on this engine, in milliseconds.

    Attributes:
        queue_ms: from arrival, or from the end of its loads, to the first scheduled step.
        prefill_ms: from there to the first token.
        transfer_ms: from the first token to the last saved block.
        load_ms: from arrival to the last loaded block.
        stages: the stages that the request has passed, each with its name and the clock times of
            its start and end: load, queue, prefill, transfer, decode.
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    load_ms: float = 0.0
    stages: tuple[tuple[str, float, float], ...] = ()


@dataclass(slots=True)
class EngineOutput:
    """New tokens of one candidate, or its end. At most one per candidate and step.

    Only the step that makes an output changes it: nothing does after its delivery. The class is
    not frozen, because one output is made per token and a frozen dataclass takes six times as
    long to make.

    Attributes:
        request_id: the request's id.
        index: the candidate's number; the rank of a ranked candidate.
        token_ids: tokens drawn since the candidate's last output, in order; all
            tokens of a ranked candidate. If the request will be handed over: the
            first token of every candidate, by index, or beam search's most likely
            first tokens, the likeliest first.
        finish_reason: set on the candidate's last output.
        is_last: whether this is the request's last output, which ends all
            candidates that have not ended.
        error: set if `finish_reason` is ERROR.
        score: the score of a ranked candidate, on its last output: that of beam
            search, or the mean log-probability of its tokens.
        logprobs: one per entry of `token_ids`, if the request asks for them.
        first_logprobs: log-probabilities of `token_ids` in the model's own distribution,
            if candidates are ranked and the request will be handed over.
        prompt_logprobs: one per token of the prompt after the first, if the request asks
            for them; set on its first output.
        cached_tokens: prompt tokens that were found or loaded instead of computed. Set
            on the request's first output and on its candidates' last ones; else 0.
        timings: set on the request's first output that carries tokens and on its last.
        handoff: set if `finish_reason` is HANDOFF, unless the connector did not take
            every block: decode must then compute the prompt itself.
        saved: full blocks of the prompt that decode can load already and that no
            earlier output listed. Such an output has no other content.
        accepted_drafts: draft tokens among `token_ids`, with `--speculative-config`.
        rejected_drafts: draft tokens that were wrong.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    is_last: bool = False
    error: BatonError | None = None
    score: float | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    first_logprobs: tuple[float, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    timings: StageTimings | None = None
    handoff: KvHandoff | None = None
    saved: KvHandoff | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0

    @property
    def stages(self) -> tuple[tuple[str, float, float], ...]:
        """Stages of the request, from its timings."""
        return () if self.timings is None else self.timings.stages

    @property
    def error_name(self) -> str:
        """The status name of its error; empty without one."""
        return "" if self.error is None else self.error.code


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine.

    Attributes:
        num_running: sequences in the running batch.
        num_waiting: requests waiting for admission, preempted and loading ones included.
        num_queued_tokens: tokens still to compute for prompts of running and
            waiting requests.
        num_free_blocks: blocks that no request holds, cached ones included.
        num_blocks: blocks in the pool.
        draining: whether new requests are refused.
        role: which requests it takes.
        prefix_cache_queries: prompt tokens looked up in the prefix cache since the start.
        prefix_cache_hits: the tokens found by these look-ups.
        num_preemptions: running requests preempted since the start.
        num_swapped_blocks: blocks in the host pool now.
        num_swap_preemptions: of the preemptions, those that copied KV to the host.
        num_loading: of the waiting requests, those whose KV is being loaded.
        num_compiling: of the waiting requests, those whose grammars are not compiled yet.
        num_swapped: of the waiting requests, those whose KV is on the host.
        num_cached_blocks: blocks in the prefix cache, free or not.
        stalled: whether the step under way takes much longer than such steps have taken.
        num_slots: slots for states in the pool; like all that follow, 0 without recurrent layers.
        num_free_slots: slots that no request holds, cached ones included.
        num_cached_slots: slots in the prefix cache, free or not.
        num_kept_states: states that running sequences have kept at ends of blocks since the start.
        num_skipped_states: those that they could not keep, as no slot was free.
        num_state_hits: sequences that began at a state of the prefix cache.
        num_state_lost_tokens: tokens that were computed again though their K and V were in the
            prefix cache, as no state was at their end.
        prompt_token_s: seconds to compute one more token of a prompt, as measured.
        decode_step_s: seconds in which each sequence decodes once while all seats are taken.
        queued_prompt_s: seconds to compute the queued prompt tokens.
        load_bytes_per_s: bytes of KV that loads have brought per second; 0 unless some ended
            lately.
        age_s: requests that arrived less than this long ago may be missing in this load.
        newest_kv_event: number of the newest event of the prefix cache; 0 before the first.
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
    num_swap_preemptions: int = 0
    num_loading: int = 0
    num_compiling: int = 0
    num_swapped: int = 0
    num_cached_blocks: int = 0
    stalled: bool = False
    role: Role = Role.BOTH
    num_slots: int = 0
    num_free_slots: int = 0
    num_cached_slots: int = 0
    num_kept_states: int = 0
    num_skipped_states: int = 0
    num_state_hits: int = 0
    num_state_lost_tokens: int = 0
    prompt_token_s: float = 0.0
    decode_step_s: float = 0.0
    queued_prompt_s: float = 0.0
    load_bytes_per_s: float = 0.0
    age_s: float = 0.0
    newest_kv_event: int = 0
