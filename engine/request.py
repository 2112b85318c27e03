"""Requests into the engine and outputs out of it: frozen plain data. Pure."""

from dataclasses import dataclass
from enum import Enum

from baton.errors import BatonError
from engine.batch import DrawParams
from kvstore.handoff import KvHandoff

__all__ = ["EngineLoad", "EngineRequest", "FinishReason", "RequestOutput", "StageTimings"]


class FinishReason(Enum):
    """Why a request ended. HANDOFF: prefill's part is done, decode goes on."""

    STOP = "stop"
    LENGTH = "length"
    HANDOFF = "handoff"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt for the engine.

    Attributes:
        request_id: unique among the engine's live requests.
        prompt_token_ids: the prompt, not empty.
        output_token_ids: tokens generated already, by prefill or by a replica
            that was lost; generation goes on after them.
        draw: how tokens are drawn.
        max_tokens: the most tokens to generate, `output_token_ids` included.
            A prefill engine generates one whatever this says.
        stop_token_ids: ids that end the generation, end-of-sequence included.
        priority: larger is scheduled first.
        cache_salt: separates prefix caches.
        handoff: where the prompt's KV is; None to compute what is not cached.
        deadline: `time.monotonic()` after which the request is ended with
            `DeadlineExceededError`; None for none.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    draw: DrawParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    handoff: KvHandoff | None = None
    deadline: float | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """New tokens of one request, or its end. At most one per request and step.

    Attributes:
        request_id: whose it is.
        token_ids: tokens drawn since the last output, in order.
        finish_reason: set on the last output.
        error: set where `finish_reason` is ERROR.
        cached_tokens: prompt tokens not computed here but found or loaded.
        timings: set on the first output that carries tokens and on the last.
        handoff: set where `finish_reason` is HANDOFF, unless the connector did
            not take every block: decode must then compute the prompt itself.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: BatonError | None = None
    cached_tokens: int = 0
    timings: StageTimings | None = None
    handoff: KvHandoff | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is. `num_queued_tokens` counts tokens still to compute
    for prompts of running and waiting requests; cached blocks count as free.
    """

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_free_blocks: int
    num_blocks: int
    draining: bool = False
