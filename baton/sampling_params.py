"""`SamplingParams`: how tokens are drawn and when to stop.

A leaf module like `baton.errors`: clients, router and engine share it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from baton.errors import InvalidArgumentError

__all__ = ["MAX_CANDIDATES", "MAX_STOPS", "MAX_STOP_BYTES", "SamplingParams"]

MAX_CANDIDATES = 64
MAX_STOPS = 16
MAX_STOP_BYTES = 256
_MAX_SEED = 2**64 - 1
_MAX_UINT32 = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn, and when a generation ends.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding.
        top_k: keep only the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens that reaches this
            probability, in (0, 1].
        seed: 64-bit; the random noise depends on (seed, position) alone. None: a
            seed is drawn for the request.
        max_tokens: the most tokens to generate.
        stop: texts that end the generation, matched across token boundaries;
            the output text stops before the match.
        stop_token_ids: token ids that end the generation.
        ignore_eos: continue past the model's end-of-sequence token.
        n: how many candidates to return. Candidate 0 draws with `seed`, the
            others with seeds derived from it.
        best_of: how many candidates to generate. The `n` with the highest mean
            log-probability per token are returned, the best first. None: `n`.
        beam_width: search with this many beams instead of drawing, and return
            the `n` best hypotheses. None: no beam search.
        length_penalty: beam search divides a hypothesis' summed
            log-probability by its length to this power.
        early_stopping: when beam search ends. True: as soon as it has
            `beam_width` finished hypotheses; False: when no running beam, scored
            at its present length, is better than the worst of them; "never":
            when no running beam can become better.

    Raises:
        InvalidArgumentError: a value is out of range; names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_numbers()
        self._check_stops()
        self._check_candidates()

    @property
    def num_candidates(self) -> int:
        """Sequences that are generated: beams, or candidates."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Whether candidates are ranked: the `n` best are returned once all have ended."""
        return self.beam_width is not None or self.n < self.num_candidates

    def _check_numbers(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidArgumentError.for_field("temperature", self.temperature, "finite and >= 0")
        if not 0 < self.top_p <= 1:
            raise InvalidArgumentError.for_field("top_p", self.top_p, "in (0, 1]")
        if not 0 <= self.top_k <= _MAX_UINT32:
            raise InvalidArgumentError.for_field("top_k", self.top_k, "in [0, 2**32)")
        if self.max_tokens < 1:
            raise InvalidArgumentError.for_field("max_tokens", self.max_tokens, ">= 1")
        if self.seed is not None and not 0 <= self.seed <= _MAX_SEED:
            raise InvalidArgumentError.for_field("seed", self.seed, "in [0, 2**64)")

    def _check_stops(self) -> None:
        for field, stops in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if len(stops) > MAX_STOPS:
                raise InvalidArgumentError(
                    f"{field} has {len(stops)} entries; at most {MAX_STOPS} are allowed"
                )
        for text in self.stop:
            if not 0 < len(text.encode()) <= MAX_STOP_BYTES:
                raise InvalidArgumentError.for_field(
                    "stop", text[:64], f"1 to {MAX_STOP_BYTES} bytes of UTF-8"
                )
        for token_id in self.stop_token_ids:
            if not 0 <= token_id <= _MAX_UINT32:
                raise InvalidArgumentError.for_field(
                    "stop_token_ids", token_id, "below the vocabulary size"
                )

    def _check_candidates(self) -> None:
        for field in ("n", "best_of", "beam_width"):
            value = getattr(self, field)
            if value is not None and not 1 <= value <= MAX_CANDIDATES:
                raise InvalidArgumentError.for_field(field, value, f"in [1, {MAX_CANDIDATES}]")
        if self.beam_width is not None and self.best_of is not None:
            raise InvalidArgumentError("best_of and beam_width are both set; set one of them")
        if self.n > self.num_candidates:
            limiting = "beam_width" if self.beam_width is not None else "best_of"
            raise InvalidArgumentError.for_field(
                "n", self.n, f"at most {limiting}, {self.num_candidates}"
            )
        if not math.isfinite(self.length_penalty):
            raise InvalidArgumentError.for_field("length_penalty", self.length_penalty, "finite")
        if self.early_stopping not in (True, False, "never"):
            raise InvalidArgumentError.for_field(
                "early_stopping", self.early_stopping, 'True, False or "never"'
            )
        if self.is_ranked and self.stop:
            raise InvalidArgumentError(
                "stop texts are set together with beam_width or best_of > n; "
                "candidates are compared by tokens: use stop_token_ids"
            )
