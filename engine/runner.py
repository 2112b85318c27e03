"""`Runner`: the interface through which the engine executes batches. Torch-free.

`engine.runtime.model_runner.ModelRunner` implements it with torch; tests drive the
scheduler with a fake runner.
"""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine.batch import ScheduledBatch, StepOutput
from engine.speculative_config import MAX_SPECULATIVE_TOKENS
from kvstore.layout import KvLayout, StateLayout

__all__ = [
    "EngineTurns",
    "LayersComputed",
    "ModelInfo",
    "NoTurns",
    "PendingOutput",
    "Runner",
    "StepCosts",
    "TurnWish",
]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a loaded model that scheduling and serving need.

    Attributes:
        max_model_len: maximum number of prompt and generated tokens together.
        vocab_size: number of token ids; they start at 0.
        eos_token_ids: ids that end a generation, from the model's
            generation_config.json and config.json.
        fingerprint: digest of config and weights.
        layout: shape of a KV block, which holds the layers of one layer group.
        windows: per layer group of attention layers, as in `engine.kv_cache.spec.KvCacheSpec`.
        states: shape of a slot of the whole model; None for a model without recurrent layers.
        tokenizer_digest: of the tokenizer's vocabulary; empty if it cannot be compared.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: bytes
    layout: KvLayout
    windows: tuple[int | None, ...] = (None,)
    tokenizer_digest: str = ""
    states: StateLayout | None = None

    @property
    def num_layer_groups(self) -> int:
        """Number of layer groups. The last one is that of the states, if there are any."""
        return len(self.windows) + (self.states is not None)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's K and V over all layers with attention."""
        return self.layout.block_bytes // self.layout.block_size * len(self.windows)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Times that preemption and speculation compare, measured when the runner was created.

    Attributes:
        prompt_token_s: seconds to compute one more token of a prompt.
        swapped_block_s: seconds to copy one block out of the pool, or back in.
        draft_token_s: seconds in which a draft model runs one more known token; 0 without one.
        proposal_s: seconds in which it drafts one token of one short sequence; 0 without one.
        max_proposals: the most tokens that it drafts for a sequence after a step.
    """

    prompt_token_s: float
    swapped_block_s: float
    draft_token_s: float = 0.0
    proposal_s: float = 0.0
    max_proposals: int = MAX_SPECULATIVE_TOKENS

    def draft_s(self, batch: ScheduledBatch) -> float:
        """Returns the seconds that a draft model needs for a step."""
        drafted_s = batch.num_drafted_tokens * self.draft_token_s
        return drafted_s + batch.num_proposals * self.proposal_s


LayersComputed = Callable[[int, int], None]
"""Called in the thread that executes a step, with the step's number and the number of leading
layers of its blocks whose KV is computed."""


class PendingOutput(Protocol):
    """The future output of a submitted step."""

    def result(self) -> StepOutput:
        """Waits until the device has finished the step, even if it fails, so that its blocks
        may be reused, and transferred while later steps run.

        Raises:
            Exception: the step failed.
        """


@dataclass(frozen=True, slots=True)
class TurnWish:
    """The longest turn of other engines that an engine with streams can bear, in seconds.

    Attributes:
        turn_s: with the requests that it has; more than 0.
        sequence_s: what it can bear besides for each sequence that it will soon decode, too.
        max_s: the most, however many these are.
    """

    turn_s: float
    sequence_s: float
    max_s: float

    def limit_s(self, num_sequences: int) -> float:
        """Returns the longest turn.

        Args:
            num_sequences: how many sequences will soon decode there besides its own.
        """
        return max(self.turn_s, min(self.max_s, self.turn_s + num_sequences * self.sequence_s))


class EngineTurns(Protocol):
    """The turns in which an engine and others compute on the same cores. Any thread may read its
    attributes; one thread at a time may take a turn.
    """

    wish: TurnWish | None
    """The longest turn of other engines that this one can bear; None if any may be long."""

    @property
    def waited_s(self) -> float:
        """Seconds waited for turns, and for kernels to be compiled, in all and until now."""

    @property
    def others_wish(self) -> TurnWish | None:
        """The longest turn that another engine could bear a moment ago; None for no limit."""

    def handed_over(self) -> None:
        """Notes that a request continues on another engine, which may take turns with this one and
        is about to decode: for a moment, what it could bear at its last turn is a limit.
        """

    def take(self, woken: threading.Event | None = None, timeout_s: float = math.inf) -> bool:
        """Waits for this engine's turn, in which the runner's next step computes.

        Args:
            woken: ends the wait when it is set; None not to wait.
            timeout_s: after which the wait ends, too.

        Returns:
            Whether it is this engine's turn. It ends with the step, or by `end`.
        """

    def end(self) -> None:
        """Ends the turn, if there is one."""


@dataclass(slots=True)
class NoTurns:
    """The `EngineTurns` of an engine that computes without waiting for others."""

    wish: TurnWish | None = None
    waited_s: float = 0.0
    others_wish: TurnWish | None = None

    def take(self, woken: threading.Event | None = None, timeout_s: float = math.inf) -> bool:
        """Returns True."""
        return True

    def handed_over(self) -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""


class Runner(Protocol):
    """Executes batches, in order of submission, on a model with a paged KV pool."""

    info: ModelInfo
    num_blocks: int
    """Number of blocks in the pool."""
    num_host_blocks: int
    """Number of blocks in the host pool, for swapped sequences; 0 without one."""
    num_slots: int
    """Number of slots for states, whose ids follow those of the blocks; 0 for a model without."""
    num_host_slots: int
    """Number of slots in the host pool, whose ids follow those of the host blocks."""
    costs: StepCosts

    @property
    def turns(self) -> EngineTurns:
        """Its turns with the other engines of the machine."""

    @property
    def kv_pool(self) -> Any:
        """The pool, a tensor of blocks of the shape `info.layout.block_shape`: `num_blocks` for
        tokens, and behind them those that hold the slots.
        """

    def check_extra_args(self, args: Mapping[str, Any]) -> None:
        """Refuses a request's `extra_args`. Any thread may call it.

        Raises:
            InvalidArgumentError: no logits processor of the runner applies to them, or a value
                is bad.
            InternalError: a processor failed.
        """

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Runs one step. `ScheduledBatch` documents the order of its parts."""

    def submit(self, batch: ScheduledBatch) -> PendingOutput:
        """Starts one step, which runs concurrently with the caller, after earlier ones.

        Raises:
            Exception: the step could not be started; no part of it is running any more.
        """

    def watch_layers(self, on_layers: LayersComputed) -> None:
        """Registers a function to call as layers are computed, before their step has finished.

        A runner need not call it. All layers are computed when the step's output is ready.
        """

    def close(self) -> None:
        """Waits for submitted steps, stops the threads, and frees the model and the pools.
        Idempotent.
        """
