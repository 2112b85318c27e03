"""What the scheduling benchmarks run: a scheduler, a runner that answers at once, request lengths.

Nothing is computed: `NullRunner` returns made-up tokens, so only the scheduler takes time.
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from engine.batch import ChunkOutput, ScheduledBatch, ScheduledChunk, StepOutput
from engine.config import EngineConfig
from engine.constraints.grammars import Grammars
from engine.groups.group import GroupState, SequenceGroup
from engine.request import EngineOutput, EngineRequest
from engine.runner import ModelInfo, StepCosts
from engine.schedule.scheduler import Scheduler
from kvstore.connector import null_connector
from kvstore.layout import KvLayout

__all__ = [
    "ALPACA",
    "BLOCK_SIZE",
    "SHAREGPT",
    "VOCAB_SIZE",
    "Lengths",
    "NullRunner",
    "greedy_request",
    "new_scheduler",
    "random_prompt",
    "running_groups",
    "serve",
]

BLOCK_SIZE = 16
VOCAB_SIZE = 1 << 15
_MAX_MODEL_LEN = 1 << 14
_TOKEN_ID = 7
_COSTS = StepCosts(prompt_token_s=1e-4, swapped_block_s=1e-4)


def greedy_request(
    request_id: str, prompt_token_ids: tuple[int, ...], max_tokens: int
) -> EngineRequest:
    """Returns a request without stop tokens that always takes the likeliest token."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    return EngineRequest(
        spec=RequestSpec(request_id=request_id, prompt_token_ids=prompt_token_ids, params=params)
    )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal prompt and output lengths like those of the PagedAttention paper.

    The means are those of Kwon et al. 2023, section 6.1. The spreads are estimated from figure 11.

    Attributes:
        name: the data set that the lengths imitate.
        mean_prompt: mean number of prompt tokens.
        mean_output: mean number of output tokens.
        prompt_spread: standard deviation of the logarithm of the prompt length.
        output_spread: standard deviation of the logarithm of the output length.
    """

    name: str
    mean_prompt: float
    mean_output: float
    prompt_spread: float
    output_spread: float

    def draw(self, num_requests: int, seed: int) -> list[tuple[int, int]]:
        """Returns (prompt, output) lengths, at most 2,048 tokens each."""
        draw = random.Random(seed)
        return [
            (
                _lognormal(draw, self.mean_prompt, self.prompt_spread),
                _lognormal(draw, self.mean_output, self.output_spread),
            )
            for _ in range(num_requests)
        ]


def _lognormal(draw: random.Random, mean: float, spread: float) -> int:
    value = draw.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return min(max(round(value), 1), 2048)


SHAREGPT = Lengths("ShareGPT", 161.31, 337.99, 1.1, 0.8)
ALPACA = Lengths("Alpaca", 19.31, 58.45, 0.5, 0.8)


def engine_config(max_num_seqs: int, **arguments: Any) -> EngineConfig:
    """Returns a config whose token budget limits no step. `arguments` replace its defaults."""
    defaults: dict[str, Any] = {
        "model": "none",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 1 << 24,
    }
    return EngineConfig(max_num_seqs=max_num_seqs, **(defaults | arguments))


def model_info(block_size: int = BLOCK_SIZE) -> ModelInfo:
    """Returns a description of a model with almost no KV."""
    return ModelInfo(
        max_model_len=_MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        fingerprint=b"none",
        layout=KvLayout(1, 1, block_size, 1, "float32"),
    )


class NullRunner:
    """A runner that computes nothing: every draw is the same token.

    Args:
        reports: most likely tokens with their log-probabilities; each step of a beam search gets a
            random one of them.
    """

    def __init__(self, reports: list[ChunkOutput] | None = None) -> None:
        self._reports = reports or []
        self._draw = random.Random(0)
        self._decoded: tuple[int, ...] = ()

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Returns the output of a step at once."""
        if len(self._decoded) != len(batch.decode_rows):
            self._decoded = (_TOKEN_ID,) * len(batch.decode_rows)
        chunks = tuple([self._output_of(chunk) for chunk in batch.chunks])
        return StepOutput(step=batch.step, chunks=chunks, decoded=self._decoded)

    def _output_of(self, chunk: ScheduledChunk) -> ChunkOutput | None:
        if chunk.num_top:
            report = self._draw.choice(self._reports)
            return ChunkOutput(report.token_ids[: chunk.num_top], report.logprobs[: chunk.num_top])
        return ChunkOutput((_TOKEN_ID,) * len(chunk.draws)) if chunk.draws else None


def new_scheduler(
    max_num_seqs: int, num_blocks: int, *, clock: Any = lambda: 0.0, **arguments: Any
) -> Scheduler:
    """Returns a scheduler without swap space or connector.

    Args:
        max_num_seqs: most sequences of a step.
        num_blocks: size of the KV pool.
        clock: returns the present time in seconds.
        arguments: further fields of `EngineConfig`.
    """
    config = engine_config(max_num_seqs, **arguments)
    info = model_info(config.block_size)
    return Scheduler(
        config,
        info,
        num_blocks=num_blocks,
        num_host_blocks=0,
        costs=_COSTS,
        namespace=b"benchmark",
        connector=null_connector()[0],
        grammars=Grammars(config, info, lambda: None),
        clock=clock,
    )


def random_prompt(
    draw: random.Random, num_tokens: int, vocab_size: int = VOCAB_SIZE
) -> tuple[int, ...]:
    """Returns a prompt of random tokens, which shares no block with other prompts."""
    return tuple(draw.choices(range(vocab_size), k=num_tokens))


def running_groups(scheduler: Scheduler) -> list[SequenceGroup]:
    """Returns the running requests. It reads a private field, which an engine must not."""
    groups = scheduler._groups.values()
    return [group for group in groups if group.state is GroupState.RUNNING]


def serve(
    scheduler: Scheduler,
    runner: NullRunner,
    requests: Iterable[EngineRequest],
    look: Callable[[], None],
) -> dict[str, list[EngineOutput]]:
    """Serves all requests, which are added at the start; returns the outputs of each.

    Args:
        scheduler: a scheduler without requests.
        runner: computes its batches.
        requests: what to serve, in order of arrival.
        look: called between `schedule` and `commit` as long as a request still waits, that is
            while batches are as full as they can be.

    Raises:
        RuntimeError: blocks are still held after the last request.
    """
    outputs: dict[str, list[EngineOutput]] = {}
    for request in requests:
        scheduler.add(request)
    while scheduler.num_unfinished:
        batch = scheduler.schedule()
        if batch is None:
            raise RuntimeError("requests are unfinished, and none can be scheduled")
        if scheduler.load().num_waiting:
            look()
        for output in scheduler.commit(batch, runner.execute(batch)):
            outputs.setdefault(output.request_id, []).append(output)
    scheduler.check()
    if scheduler.kv.pool.num_free != scheduler.kv.pool.num_blocks:
        raise RuntimeError("blocks are still held after the last request")
    return outputs
