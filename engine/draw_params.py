"""`DrawParams`: how the tokens of one row are drawn from their logits. Frozen and plain."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams

__all__ = ["DrawParams", "LogitRules", "candidate_seed"]

_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Changes of a row's logits before a token is drawn from them.

    `baton.SamplingParams` describes the penalties and `bias`. They change the logits in
    this order: `bias`, penalties, then all tokens that must not be drawn become -inf.

    Attributes:
        num_prompt: leading tokens of the row's sequence that are the prompt; the penalties
            of presence and frequency count only those after them.
        repetition_penalty: 1 if off.
        presence_penalty: 0 if off.
        frequency_penalty: 0 if off.
        bias: (token id, value to add), by token id.
        allowed: the only tokens that may be drawn; None: all.
        bad_words: sequences of tokens. The last token of one must not be drawn after the
            tokens before it. At most 512 sequences of 1 to 64 tokens.
        min_length: length of the sequence, prompt included, before which none of
            `stop_token_ids` may be drawn.
        stop_token_ids: ascending.
    """

    num_prompt: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: RequestSpec) -> "LogitRules | None":
        """The rules of a request; None if it has none.

        Lists of tokens are those of the request itself, since a copy of 100,000 allowed tokens
        would take a millisecond.
        """
        params, num_prompt = spec.params, len(spec.prompt_token_ids)
        has_min_length = bool(params.min_tokens and spec.stop_token_ids)
        rules = cls(
            num_prompt=num_prompt,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias=tuple((params.logit_bias or {}).items()),
            allowed=None
            if params.allowed_token_ids is None
            else tuple(params.allowed_token_ids),  # the same object, as it is a tuple
            bad_words=spec.bad_words_token_ids,
            min_length=num_prompt + params.min_tokens if has_min_length else 0,
            stop_token_ids=tuple(sorted(spec.stop_token_ids)) if has_min_length else (),
        )
        return None if rules == cls(num_prompt) else rules

    @property
    def reads_history(self) -> bool:
        """Whether the rules depend on the sequence's tokens, and not only on its length."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0) or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How the tokens of one row are drawn from their logits.

    Attributes:
        params: the request's.
        seed: the candidate's.
        rules: the request's. None: no rules.
    """

    params: SamplingParams
    seed: int
    rules: LogitRules | None = None

    @classmethod
    def of_candidates(cls, spec: RequestSpec, indices: Iterable[int]) -> tuple["DrawParams", ...]:
        """The parameters that candidates of a request draw with; they share the rules."""
        seed, rules = spec.params.seed, LogitRules.of(spec)
        assert seed is not None, "a request's seed is set before an engine gets it"
        return tuple(cls(spec.params, candidate_seed(seed, index), rules) for index in indices)


def candidate_seed(seed: int, index: int) -> int:
    """The seed that candidate `index` of a request draws with; candidate 0 uses the request's.

    The value is SplitMix64's output function (Steele et al. 2014) of the request's seed
    plus `index` times its increment, so the seeds of a request's candidates differ from each
    other, whatever the request's seed is.
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)
