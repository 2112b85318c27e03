"""Constrained requests on an engine in this process: what masks cost in each step, and what
jump-forward decoding saves.
"""

import statistics
import sysconfig
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.structured_outputs import StructuredOutputs
from benchmarks.offline.step_profile import StepClock
from engine.constraints.grammars import Grammars
from engine.constraints.vocabulary import bits_of
from engine.core import EngineCore
from engine.groups.group import Sequence as EngineSequence
from engine.request import EngineOutput, EngineRequest
from engine.runtime.draws.rules import RowRules
from engine.schedule.guides import Guides

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
_KINDS = ("plain", "masks", "masks and rules")
_RULES: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "logit_bias": dict.fromkeys(range(64), 0.01),
    "min_tokens": 3,
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
        guides_ms: grammars accept tokens and make masks.
        rules_ms: masks and rules change logits.
    """

    vocab_size: int
    batch_size: int
    kind: str
    num_steps: int
    step_ms: float
    guides_ms: float
    rules_ms: float


@dataclass(frozen=True, slots=True)
class JumpTimes:
    """A batch of objects, with jump-forward decoding and with a draw for each token.

    Attributes:
        batch_size: number of requests.
        num_tokens: generated tokens, the same ones in both; of the last round.
        num_forced: those of them that were appended without a draw.
        num_steps: steps with jump-forward, and without.
        jumping_s: median seconds with jump-forward.
        drawing_s: median seconds without.
        speed_up: median ratio of the two, by round.
    """

    batch_size: int
    num_tokens: int
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
    core: EngineCore, batch_size: int, num_steps: int, repeats: int
) -> list[MaskTimes]:
    """Decodes batches of each kind in turn, without jump-forward, so that each step draws one
    token per request, and returns the medians of each kind.
    """
    steps: dict[str, list[dict[str, int]]] = {kind: [] for kind in _KINDS}
    for round_index in range(repeats + 1):  # the first compiles the grammar and records steps
        for kind, taken in steps.items():
            requests = [
                _request(core, index, [3 + index, 7], num_steps, **_fields_of(kind))
                for index in range(batch_size)
            ]
            with _clocked(core) as times, _drawing_all({}):
                _run(core, requests, times)
            if round_index:
                # The first of these steps computes the prompts.
                full = [step for num_drawn, step in times.steps if num_drawn == batch_size]
                taken.extend(full[1:])
    return [
        MaskTimes(
            core.info.vocab_size,
            batch_size,
            kind,
            len(taken),
            *(_median_ms(taken, phases) for phases in (_PHASES, ("guides",), ("rules",))),
        )
        for kind, taken in steps.items()
    ]


def measure_jumps(
    core: EngineCore, prompt: Sequence[int], batch_size: int, temperature: float, repeats: int
) -> JumpTimes:
    """Generates objects with jump-forward and without it in turn, and returns the medians.

    Both generate the same tokens: without jump-forward, masks allow only those.
    """
    times = []
    for round_index in range(repeats + 1):  # the first compiles the grammar and records steps
        requests = [
            _request(
                core,
                index,
                [*prompt, 3 + index],
                512,
                structured_outputs=_OBJECT,
                temperature=temperature,
                seed=1000 * round_index + index,
            )
            for index in range(batch_size)
        ]
        jumping = _run(core, requests)
        with _drawing_all(jumping.tokens):
            drawing = _run(core, requests)
        assert drawing.tokens == jumping.tokens, "both runs generate the same tokens"
        if round_index:
            times.append((jumping.duration_s, drawing.duration_s))
    num_tokens = sum(map(len, jumping.tokens.values()))
    jumping_s, drawing_s = zip(*times, strict=True)
    return JumpTimes(
        batch_size,
        num_tokens,
        num_tokens - jumping.num_drawn,
        (jumping.num_steps, drawing.num_steps),
        statistics.median(jumping_s),
        statistics.median(drawing_s),
        statistics.median(slow / fast for fast, slow in times),
    )


def _fields_of(kind: str) -> dict[str, Any]:
    fields = {"plain": {}, "masks": {"structured_outputs": _OBJECT}}
    return fields.get(kind, _RULES | fields["masks"])


def _request(
    core: EngineCore, index: int, prompt: Sequence[int], max_tokens: int, **fields: Any
) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": max_tokens} | fields)
    is_free = params.structured_outputs is None
    stop_token_ids = frozenset() if is_free else frozenset(core.info.eos_token_ids)
    spec = RequestSpec(
        request_id=str(index),
        prompt_token_ids=tuple(prompt),
        params=params,
        stop_token_ids=stop_token_ids,
    )
    return EngineRequest(spec=spec)


@dataclass(slots=True)
class _Run:
    """The outcome of a run: tokens by request; how many were drawn; steps; seconds."""

    tokens: dict[str, list[int]]
    num_drawn: int = 0
    num_steps: int = 0
    duration_s: float = 0.0


class _StepTimes:
    """Collects the phases of each step, in nanoseconds, and how many tokens it drew."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.steps: list[tuple[int, dict[str, int]]] = []

    def add(self, num_drawn: int) -> None:
        self.steps.append((num_drawn, self._clock.take_times()))


def _run(
    core: EngineCore, requests: Sequence[EngineRequest], times: _StepTimes | None = None
) -> _Run:
    """Runs requests that start together; each output has one drawn token."""
    run = _Run({request.spec.request_id: [] for request in requests})
    started = time.perf_counter()
    outputs: list[EngineOutput] = []
    for request in requests:
        core.check(request)
        outputs += core.add_request(request)
    while core.has_work:
        core.run_step(outputs.extend)
        num_drawn = _record(outputs, run)
        outputs.clear()
        if times is not None:
            times.add(num_drawn)
        core.wait()
    run.duration_s = time.perf_counter() - started
    return run


def _record(outputs: Sequence[EngineOutput], run: _Run) -> int:
    """Records a step's outputs; returns how many tokens it drew."""
    num_drawn = 0
    for output in outputs:
        if output.error is not None:
            raise output.error
        run.tokens[output.request_id] += output.token_ids
        num_drawn += bool(output.token_ids)
    run.num_drawn += num_drawn
    run.num_steps += num_drawn > 0
    return num_drawn


_PHASES = ("guides", "rules", "rest")


@contextmanager
def _clocked(core: EngineCore) -> Generator[_StepTimes, None, None]:
    """Times the phases of the engine's steps meanwhile."""
    clock = StepClock()
    with (
        patch.object(Guides, "advance", clock.timed("guides", Guides.advance)),
        patch.object(RowRules, "apply_to_chunks", clock.timed("rules", RowRules.apply_to_chunks)),
        patch.object(core, "run_step", clock.timed("rest", core.run_step)),
    ):
        yield _StepTimes(clock)


class _ForcesNothing:
    """A `Retokenizer` without which all tokens are drawn."""

    def forced_tokens(self, matcher: object, token_ids: Sequence[int]) -> list[int]:
        """Returns no tokens."""
        return []


@contextmanager
def _drawing_all(scripts: Mapping[str, Sequence[int]]) -> Generator[None, None, None]:
    """Turns jump-forward off meanwhile. Masks allow only the next token of a request's script,
    if it has one, but cost what they do without.
    """

    def restrict(sequence: EngineSequence) -> None:
        script = scripts.get(sequence.group.request.spec.request_id, ())
        index = len(sequence.token_ids) - sequence.group.num_prompt
        if sequence.guide is not None and sequence.guide.mask is not None and index < len(script):
            sequence.guide.mask = _mask_of(script[index], len(sequence.guide.mask))

    def then_restrict(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(guides: Guides, changed: Any, *args: Any) -> Any:
            result = method(guides, changed, *args)
            is_one = isinstance(changed, EngineSequence)
            for sequence in (changed,) if is_one else changed.branches or changed.running:
                restrict(sequence)
            return result

        return wrapper

    with (
        patch.object(Grammars, "retokenizer", _ForcesNothing()),
        patch.object(Guides, "advance", then_restrict(Guides.advance)),
        patch.object(Guides, "attach", then_restrict(Guides.attach)),
    ):
        yield


def _mask_of(token_id: int, num_bytes: int) -> bytes:
    """Returns a mask that allows one token."""
    row = np.zeros(num_bytes // 4, np.int32)
    words, bits = bits_of((token_id,))
    row[words] = bits
    return row.tobytes()


def _median_ms(steps: Sequence[Mapping[str, int]], phases: Sequence[str]) -> float:
    return statistics.median(sum(step.get(phase, 0) for phase in phases) for step in steps) / 1e6
