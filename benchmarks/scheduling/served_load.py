"""The load of the scheduler's benchmark: a scheduler, and a runner that answers at once.

Nothing is computed: `NullRunner` returns made-up tokens, so only the scheduler takes time.
"""

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from engine.batch import ChunkOutput, ScheduledBatch, StepOutput
from engine.config import EngineConfig
from engine.constraints.grammars import Grammars
from engine.request import EngineRequest
from engine.runner import ModelInfo, StepCosts
from engine.schedule.parts import SchedulerParts
from engine.schedule.scheduler import Scheduler
from kvstore.connector import null_connector
from kvstore.layout import KvLayout

__all__ = ["BLOCK_SIZE", "VOCAB_SIZE", "NullRunner", "greedy_request", "new_scheduler"]

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


class NullRunner:
    """A runner that computes nothing: every draw is the same token."""

    def __init__(self) -> None:
        self._decoded: tuple[int, ...] = ()

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Returns the output of a step at once."""
        if len(self._decoded) != len(batch.decode_rows):
            self._decoded = (_TOKEN_ID,) * len(batch.decode_rows)
        chunks = tuple(
            ChunkOutput((_TOKEN_ID,) * len(chunk.draws)) if chunk.draws else None
            for chunk in batch.chunks
        )
        return StepOutput(step=batch.step, chunks=chunks, decoded=self._decoded)


def new_scheduler(max_num_seqs: int, num_blocks: int) -> Scheduler:
    """Returns a scheduler without swap space or connector, whose token budget limits no step.

    Args:
        max_num_seqs: most sequences of a step.
        num_blocks: size of the KV pool.
    """
    config = EngineConfig(
        model="none",
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1 << 24,
    )
    info = ModelInfo(
        max_model_len=_MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        fingerprint=b"none",
        layout=KvLayout(1, 1, BLOCK_SIZE, 1, "float32"),
    )
    parts = SchedulerParts.build(
        config,
        info,
        num_blocks=num_blocks,
        num_host_blocks=0,
        costs=_COSTS,
        namespace=b"benchmark",
        connector=null_connector()[0],
        grammars=Grammars(config, info, lambda: None),
        clock=lambda: 0.0,
    )
    return Scheduler(parts)
