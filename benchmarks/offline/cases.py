"""The cases of `baton bench latency` and their figures. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from baton.common.errors import ConfigurationError
from benchmarks.model_cost import Ceilings, ModelShape, floor_s, step_floor_s
from benchmarks.request import BenchRequest, MeasuredRequest
from benchmarks.workloads.kind import LengthRange
from benchmarks.workloads.synthetic import random_lengths

__all__ = ["CaseResult", "OfflineCase", "RunTimes", "make_cases", "run_times", "summarize"]


@dataclass(frozen=True, slots=True)
class OfflineCase:
    """Requests that start together: their number, tokens of each prompt, tokens to generate."""

    batch_size: int
    input_len: int
    output_len: int

    def requests(self, vocab_size: int, seed: int) -> Sequence[BenchRequest]:
        """Returns requests of random tokens. Those of another seed share no prefix with them."""
        return random_lengths(
            num_requests=self.batch_size,
            input_len=LengthRange(self.input_len, self.input_len),
            output_len=LengthRange(self.output_len, self.output_len),
            vocab_size=vocab_size,
            seed=seed,
        ).requests


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Figures of one run of a case.

    Attributes:
        prefill_ms: until every request has its first token.
        step_ms: median gap between tokens while all requests decode.
        output_tokens_per_s: output tokens of the whole run over its duration.
    """

    prefill_ms: float
    step_ms: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Medians over the runs of a case, and their floors.

    Attributes:
        case: the case.
        prefill_ms: until every request has its first token.
        prefill_floor_ms: operations of the prompts over the matrix rate, or bytes
            of the weights over the bandwidth.
        step_ms: per token of each request, while all decode.
        step_floor_ms: the same for a step at half the output.
        output_tokens_per_s: output tokens of the whole run over its duration.
    """

    case: OfflineCase
    prefill_ms: float
    prefill_floor_ms: float
    step_ms: float
    step_floor_ms: float
    output_tokens_per_s: float


def make_cases(
    batch_sizes: Sequence[int], input_lens: Sequence[int], output_lens: Sequence[int]
) -> list[OfflineCase]:
    """Returns every combination of the numbers.

    Raises:
        ConfigurationError: a number is out of range; names the flag.
    """
    for flag, values, least in (
        ("--batch-size", batch_sizes, 1),
        ("--input-len", input_lens, 1),
        # With fewer than three tokens, there is no gap in which all requests decode.
        ("--output-len", output_lens, 3),
    ):
        for value in values:
            if value < least:
                raise ConfigurationError(f"{flag} has {value}; it must be >= {least}")
    return [OfflineCase(*sizes) for sizes in product(batch_sizes, input_lens, output_lens)]


def run_times(records: Sequence[MeasuredRequest]) -> RunTimes:
    """Returns the figures of a run.

    Raises:
        ConfigurationError: a request failed, or the requests never decode all at the same time,
            because the engine's limits are too small for the case.
    """
    for record in records:
        if record.error is not None:
            raise ConfigurationError(f"a request failed: {record.error}")
    prefilled_s = max(record.token_times_s[0] for record in records)
    first_end_s = min(record.token_times_s[-1] for record in records)
    gaps_s = [
        late - early
        for record in records
        for early, late in pairwise(record.token_times_s)
        if prefilled_s <= early and late <= first_end_s
    ]
    if not gaps_s:
        raise ConfigurationError(
            f"{len(records)} requests never decode all together; use a smaller --batch-size, "
            "a larger --output-len, or a larger --max-num-seqs or --kv-cache-memory-bytes"
        )
    started_s, ended_s = min(r.sent_s for r in records), max(r.ended_s for r in records)
    num_tokens = sum(len(record.token_times_s) for record in records)
    return RunTimes(
        prefill_ms=1000 * (prefilled_s - started_s),
        step_ms=1000 * statistics.median(gaps_s),
        output_tokens_per_s=num_tokens / (ended_s - started_s),
    )


def summarize(
    case: OfflineCase, runs: Sequence[RunTimes], shape: ModelShape, ceilings: Ceilings
) -> CaseResult:
    """Returns the medians of a case's runs, with its floors."""
    first_tokens = [
        BenchRequest(request.prompt_token_ids, 1)
        for request in case.requests(vocab_size=1 << 16, seed=0)
    ]
    context = case.input_len + case.output_len // 2
    return CaseResult(
        case=case,
        prefill_ms=statistics.median(run.prefill_ms for run in runs),
        prefill_floor_ms=1000 * floor_s(first_tokens, shape, ceilings),
        step_ms=statistics.median(run.step_ms for run in runs),
        step_floor_ms=1000 * step_floor_s(shape, ceilings, case.batch_size, context),
        output_tokens_per_s=statistics.median(run.output_tokens_per_s for run in runs),
    )
