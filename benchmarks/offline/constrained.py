"""Constrained requests on an engine in this process: what masks cost in each step, and what
jump-forward decoding saves.
"""

import statistics
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.structured_outputs import StructuredOutputs
from benchmarks.offline.offline_engine import MeasuredStep, OfflineEngine

__all__ = ["JumpTimes", "MaskTimes", "measure_jumps", "measure_masks", "train_tokenizer"]

_SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
_METHODS = ["standard", "express", "overnight", "collect in store"]
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shipping_method": {"enum": _METHODS},
        "is_gift_wrapping_requested": {"type": "boolean"},
        "number_of_delivery_attempts": {"type": "integer", "minimum": 0, "maximum": 99},
        "preferred_payment_currency": {"enum": ["EUR", "USD", "GBP", "JPY"]},
        "customer_loyalty_level": {"enum": ["bronze", "silver", "gold"]},
        "has_accepted_terms_of_service": {"type": "boolean"},
        "estimated_delivery_days": {"type": "integer", "minimum": 1, "maximum": 30},
        "requires_signature_on_delivery": {"type": "boolean"},
    },
}
_SCHEMA["required"] = list(_SCHEMA["properties"])
_OBJECT = StructuredOutputs(json=_SCHEMA, disable_any_whitespace=True)
_DRAWN: dict[str, Any] = {"structured_outputs": _OBJECT, "min_tokens": 1}
"""Parameters of a constrained request whose tokens are all drawn: a request with a minimum of
tokens has no forced ones."""
_RULES: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "logit_bias": dict.fromkeys(range(64), 0.01),
    "min_tokens": 3,
}
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masks": _DRAWN,
    "masks and rules": _DRAWN | _RULES,
}


@dataclass(frozen=True, slots=True)
class MaskTimes:
    """Medians over the steps in which all requests of a batch draw a token, in milliseconds.

    Attributes:
        vocab_size: number of logits.
        batch_size: number of requests.
        kind: "plain", "masks" or "masks and rules".
        num_steps: number of steps.
        step_ms: the whole step.
        execute_ms: inputs, forward pass, and draws, for which masks and rules change logits.
        commit_ms: results are processed; grammars accept tokens and make masks.
    """

    vocab_size: int
    batch_size: int
    kind: str
    num_steps: int
    step_ms: float
    execute_ms: float
    commit_ms: float


@dataclass(frozen=True, slots=True)
class JumpTimes:
    """A batch of objects, with jump-forward decoding and with a draw for each token.

    Attributes:
        batch_size: number of requests.
        num_tokens: generated tokens with jump-forward, and without; of the last round.
        num_forced: those with jump-forward that were appended without a draw.
        num_steps: steps with jump-forward, and without.
        jumping_s: median seconds of a generated token with jump-forward.
        drawing_s: median seconds of a generated token without.
        speed_up: median ratio of the two, by round.
    """

    batch_size: int
    num_tokens: tuple[int, int]
    num_forced: int
    num_steps: tuple[int, int]
    jumping_s: float
    drawing_s: float
    speed_up: float


def train_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE tokenizer of Python's standard library, whose texts may run out
    before it has `vocab_size` tokens. Its token 2 ends sequences.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
    texts = (path.read_text(errors="replace") for path in paths if path.parent.name[:4] != "site")
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def measure_masks(
    engine: OfflineEngine, batch_size: int, num_steps: int, repeats: int
) -> list[MaskTimes]:
    """Decodes batches of each kind in turn, without jump-forward, so that each step draws one
    token per request, and returns the medians of each kind.
    """
    kept: dict[str, list[MeasuredStep]] = {kind: [] for kind in _KINDS}
    for round_index in range(repeats + 1):  # the first compiles the grammar and records steps
        for kind, steps in kept.items():
            specs = [
                _spec(engine, [3 + index, 7], num_steps, **_KINDS[kind])
                for index in range(batch_size)
            ]
            full = [s for s in engine.run_specs(specs).steps if s.num_draws == batch_size]
            if round_index:
                steps.extend(full[1:])  # the first of these steps computes the prompts
    return [
        MaskTimes(
            engine.core.info.vocab_size,
            batch_size,
            kind,
            len(steps),
            _median_ms(steps, lambda step: step.seconds),
            _median_ms(steps, lambda step: step.phases["execute"]),
            _median_ms(steps, lambda step: step.phases["commit"]),
        )
        for kind, steps in kept.items()
    ]


def measure_jumps(
    engine: OfflineEngine,
    prompt: Sequence[int],
    batch_size: int,
    temperature: float,
    repeats: int,
) -> JumpTimes:
    """Generates objects with jump-forward and without it in turn, and returns the medians.

    A model of random weights writes drawn text in shorter tokens than forced text, so seconds per
    token are compared.
    """
    times = []
    for round_index in range(repeats + 1):  # the first compiles the grammar and records steps
        jumping, drawing = (
            engine.run_specs(
                [
                    _spec(
                        engine,
                        [*prompt, 3 + index],
                        512,
                        temperature=temperature,
                        seed=1000 * round_index + index,
                        **fields,
                    )
                    for index in range(batch_size)
                ]
            )
            for fields in ({"structured_outputs": _OBJECT}, _DRAWN)
        )
        if round_index:
            times.append(tuple(run.duration_s / run.num_tokens for run in (jumping, drawing)))
    jumping_s, drawing_s = zip(*times, strict=True)
    return JumpTimes(
        batch_size,
        (jumping.num_tokens, drawing.num_tokens),
        jumping.num_tokens - jumping.num_draws,
        (jumping.num_steps, drawing.num_steps),
        statistics.median(jumping_s),
        statistics.median(drawing_s),
        statistics.median(slow / fast for fast, slow in times),
    )


def _spec(
    engine: OfflineEngine, prompt: Sequence[int], max_tokens: int, **fields: Any
) -> RequestSpec:
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": max_tokens} | fields)
    is_free = params.structured_outputs is None
    return RequestSpec(
        request_id="",
        prompt_token_ids=tuple(prompt),
        params=params,
        stop_token_ids=frozenset() if is_free else frozenset(engine.core.info.eos_token_ids),
    )


def _median_ms(steps: Sequence[MeasuredStep], seconds: Callable[[MeasuredStep], float]) -> float:
    return 1e3 * statistics.median(map(seconds, steps))
