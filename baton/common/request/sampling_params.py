"""`SamplingParams`: how tokens are drawn, when to stop, and what is returned.

A leaf module like `baton.common.errors`: clients, router and engine share it. Names and defaults
are those of vLLM's class of the same name, where that has the field; meanings differ in a few
places, which docs/sampling.md states.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Literal, get_type_hints

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import compact_json
from baton.common.request.param_checks import (
    MAX_ENTRIES,
    MAX_STOP_BYTES,
    MAX_STOPS,
    MAX_UINT32,
    check_float32,
    check_ids,
    check_texts,
    param_biases,
    param_entries,
    param_integer,
)
from baton.common.request.structured_outputs import StructuredOutputs

__all__ = [
    "AS_MANY_AS_FIT",
    "MAX_CANDIDATES",
    "MAX_EXTRA_ARGS_BYTES",
    "MAX_LOGPROBS",
    "MAX_STOPS",
    "MAX_STOP_BYTES",
    "MODEL_DEFAULTS",
    "PARAM_TYPES",
    "RequestOutputKind",
    "SamplingParams",
]

MAX_CANDIDATES = 64
MAX_EXTRA_ARGS_BYTES = 64 * 1024
MAX_LOGPROBS = 20
_MAX_LOGIT_BIAS = 100.0
_MAX_PENALTY = 2.0
_MAX_SEED = 2**64 - 1
_MAX_INT32 = 2**31 - 1
AS_MANY_AS_FIT = MAX_UINT32
"""`max_tokens` of a request that sets None: as many as the context has room for."""


class RequestOutputKind(Enum):
    """The kinds of results that `AsyncLLM.generate` yields."""

    CUMULATIVE = 0
    """Results with everything so far."""
    DELTA = 1
    """Results with what is new since the last one."""
    FINAL_ONLY = 2
    """One result, at the end."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn, when a generation ends, and what is returned.

    None for a field means its default, except where it says otherwise.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding.
        top_k: keep only the k most likely tokens; 0 and -1 keep all.
        top_p: keep the smallest set of most likely tokens that reaches this
            probability, in (0, 1].
        min_p: keep only tokens whose probability is at least this share of the
            likeliest token's, in [0, 1]. 0 keeps all.
        repetition_penalty: logits of tokens in the prompt or the output are divided by
            this if positive and multiplied if negative (Keskar et al. 2019, CTRL). 1: off.
        presence_penalty: subtracted from the logits of tokens in the output, in [-2, 2].
        frequency_penalty: subtracted from the logit of a token once for each time that
            the output has it, in [-2, 2].
        logit_bias: added to the logits, by token id; at most 1024 entries in [-100, 100].
            None: nothing is added.
        allowed_token_ids: only these tokens are drawn; at most 2**18 ids. Repeated ids are
            removed. None: all.
        bad_words: texts whose tokens are not drawn in sequence; at most 256, each of at
            most 256 bytes of UTF-8.
        min_tokens: no stop token is drawn, and no stop text ends the generation,
            before the output has this many tokens.
        seed: 64-bit; the random noise depends on (seed, position) alone. None: a
            seed is drawn for the request.
        max_tokens: the most tokens to generate. None: as many as the model's
            context has room for.
        stop: texts that end the generation, matched across token boundaries;
            the output text stops before the match. At most 16, each of at most 256
            bytes of UTF-8. None: no texts.
        stop_token_ids: at most 16 token ids that end the generation; the output text has
            no text of theirs. None: no ids.
        include_stop_str_in_output: whether the output text includes what ended it: the
            stop text, or the text of the stop token.
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
        logprobs: return the log-probability of each generated token, and those of
            this many likeliest tokens at its place, up to 20. None: none.
        prompt_logprobs: the same for the tokens of the prompt. Such a request computes
            its whole prompt, whatever caches hold.
        truncate_prompt_tokens: keep only this many last tokens of the prompt; -1 keeps
            as many as the model's context has room for. Special tokens that the tokenizer
            adds at the start of a text are kept, and count. None: too long prompts are
            refused.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: keep the spaces that some tokenizers write between
            special tokens; those of byte-level and metaspace vocabularies write none.
        detokenize: return text; if not, tokens alone, and `stop` must be empty.
        structured_outputs: the form that the text must have; a mapping of the fields is
            converted. None: any.
        thinking_token_budget: the most tokens of the reasoning part; then only the tokens
            of its end tag can be drawn. None and -1: no limit.
        extra_args: JSON values for logits processors (`--logits-processors`), by name; a
            mapping or its JSON text, of at most 64 KiB. Kept as a copy. None: no processor
            applies.
        prediction: a text that the output will probably repeat. Workers with
            `--speculative-config` take draft tokens from it, which changes no token; others ignore
            it. At most as many tokens as the model's context has. Empty: none.
        output_kind: what `AsyncLLM.generate` yields. Nothing else reads it.

    Raises:
        InvalidArgumentError: a value is out of range; names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    seed: int | None = None
    max_tokens: int = 16
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    extra_args: Mapping[str, Any] | None = None
    prediction: str = ""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._normalize()
        self._check_numbers()
        self._check_penalties()
        self._check_stops()
        self._check_token_rules()
        self._check_candidates()
        self._check_outputs()

    def _normalize(self) -> None:
        """Replaces None where it stands for another value, and lists by tuples.

        The number of entries is checked first: a client's message may have millions.
        """
        for name, value in _INSTEAD_OF_NONE.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._check_types()
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name in MAX_ENTRIES:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, param_entries(name, value))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", param_biases(self.logit_bias) or None)
        if self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)
        if self.structured_outputs is not None:
            outputs = StructuredOutputs.of(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", outputs)
        if self.extra_args is not None:
            text = compact_json("extra_args", self.extra_args, MAX_EXTRA_ARGS_BYTES)
            object.__setattr__(self, "extra_args", json.loads(text) or None)

    def _check_types(self) -> None:
        """Refuses values with which the engine would fail; integers of numpy become Python's."""
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                object.__setattr__(self, name, param_integer(name, value))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError.for_field(name, getattr(self, name), "True or False")
        if not isinstance(self.prediction, str):
            raise InvalidArgumentError.for_field("prediction", self.prediction, "a text")

    def with_seed(self, seed: int) -> "SamplingParams":
        """A copy with another seed, 64-bit. `replace` would check all fields again, and nearly each
        request needs a seed.
        """
        other = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            object.__setattr__(other, name, getattr(self, name))
        object.__setattr__(other, "seed", seed)
        return other

    @property
    def num_candidates(self) -> int:
        """Sequences that are generated: beams, or candidates."""
        return self.beam_width or self.best_of or self.n

    @property
    def log_min_p(self) -> float:
        """The logarithm of `min_p`, -inf for 0. Devices compare with it and take none themselves,
        as they may round it differently.
        """
        return math.log(self.min_p) if self.min_p > 0 else -math.inf

    @property
    def is_ranked(self) -> bool:
        """Whether candidates are ranked: the `n` best are returned once all have ended."""
        return self.beam_width is not None or self.n < self.num_candidates

    def _check_numbers(self) -> None:
        check_float32("temperature", self.temperature, _is_temperature, "finite and >= 0")
        check_float32("top_p", self.top_p, lambda top_p: 0 < top_p <= 1, "in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise InvalidArgumentError.for_field("min_p", self.min_p, "in [0, 1]")
        if not 0 <= self.top_k <= MAX_UINT32:
            raise InvalidArgumentError.for_field("top_k", self.top_k, "in [0, 2**32), or -1")
        if not 1 <= self.max_tokens <= MAX_UINT32:
            raise InvalidArgumentError.for_field("max_tokens", self.max_tokens, "in [1, 2**32)")
        if not 0 <= self.min_tokens <= self.max_tokens:
            limit = f"in [0, {self.max_tokens}], max_tokens"
            raise InvalidArgumentError.for_field("min_tokens", self.min_tokens, limit)
        if self.seed is not None and not 0 <= self.seed <= _MAX_SEED:
            raise InvalidArgumentError.for_field("seed", self.seed, "in [0, 2**64)")
        budget = self.thinking_token_budget
        if budget is not None and not (type(budget) is int and 0 <= budget <= MAX_UINT32):
            limit = "an integer in [0, 2**32), or -1"
            raise InvalidArgumentError.for_field("thinking_token_budget", budget, limit)

    def _check_penalties(self) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            if not -_MAX_PENALTY <= value <= _MAX_PENALTY:
                raise InvalidArgumentError.for_field(field, value, "in [-2, 2]")
        penalty = self.repetition_penalty
        if not (math.isfinite(penalty) and penalty > 0):
            raise InvalidArgumentError.for_field("repetition_penalty", penalty, "finite and > 0")

    def _check_stops(self) -> None:
        check_texts("stop", self.stop)
        check_ids("stop_token_ids", self.stop_token_ids)
        if self.stop and not self.detokenize:
            raise InvalidArgumentError("stop is set together with detokenize=False; unset one")

    def _check_token_rules(self) -> None:
        check_texts("bad_words", self.bad_words)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidArgumentError("allowed_token_ids is empty; it must allow a token")
            check_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            check_ids("logit_bias", self.logit_bias)
            for bias in self.logit_bias.values():
                if not -_MAX_LOGIT_BIAS <= bias <= _MAX_LOGIT_BIAS:
                    raise InvalidArgumentError.for_field("logit_bias", bias, "in [-100, 100]")

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
        if self.beam_width is not None:
            self._check_beams()

    def _check_beams(self) -> None:
        """Refuses what beam search, which ranks by the model's own probabilities, cannot obey."""
        for field in _NOT_FOR_BEAMS:
            if getattr(self, field) != _DEFAULTS[field]:
                raise InvalidArgumentError(f"{field} is set together with beam_width; unset one")

    def _check_outputs(self) -> None:
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidArgumentError.for_field(field, value, f"in [0, {MAX_LOGPROBS}]")
        if not isinstance(self.output_kind, RequestOutputKind):
            limit = "a RequestOutputKind"
            raise InvalidArgumentError.for_field("output_kind", self.output_kind, limit)
        truncated = self.truncate_prompt_tokens
        if truncated is not None and not (truncated == -1 or 1 <= truncated <= _MAX_INT32):
            limit = "in [1, 2**31), or -1"
            raise InvalidArgumentError.for_field("truncate_prompt_tokens", truncated, limit)


PARAM_TYPES: Mapping[str, Any] = {
    name: kind | None for name, kind in get_type_hints(SamplingParams).items()
}
"""The type of each field's values, among which None is for all. Flags of the command line and
fields of HTTP bodies are made of it."""
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
"""The fields whose defaults a checkpoint may state, as in vLLM."""
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_INSTEAD_OF_NONE = {name: value for name, value in _DEFAULTS.items() if value is not None}
_INSTEAD_OF_NONE["max_tokens"] = AS_MANY_AS_FIT
_INTEGERS = tuple(
    name
    for name, kind in PARAM_TYPES.items()
    if kind == int | None and name != "thinking_token_budget"  # whose own check refuses True
)
_SWITCHES = tuple(name for name, kind in PARAM_TYPES.items() if kind == bool | None)
_NOT_FOR_BEAMS = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
    "thinking_token_budget",
    "extra_args",
)


def _is_temperature(value: float) -> bool:
    return math.isfinite(value) and value >= 0
