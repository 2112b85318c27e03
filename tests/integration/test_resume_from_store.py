"""A request that lost its decode engine, on real tensors: another engine loads it from a store."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from engine.config import EngineConfig
from engine.loop.build import build_engine
from engine.loop.core import EngineCore
from engine.request import CandidateProgress, EngineOutput, EngineRequest
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.engine_work import has_work
from tests.support.requests import changed, engine_request

BLOCK_SIZE, NUM_TOKENS = 8, 120
PROMPT = prompt_of(45, seed=7)


@contextmanager
def opened(url: str) -> Iterator[EngineCore]:
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")),
        dtype="float32",
        max_model_len=256,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=64,
        num_threads=1,
        kv_connector=url,
        kv_load_failure_policy="fail",  # a slow load is not given up for computing
    )
    with closing(build_engine(config)) as core:
        yield core


def run(core: EngineCore, request: EngineRequest, num_tokens: int) -> list[int]:
    """Runs a request until it has some tokens more; returns them."""
    tokens: list[int] = []

    def take(outputs: list[EngineOutput]) -> None:
        tokens.extend(token for output in outputs for token in output.token_ids)

    take(core.scheduler.add(request))
    while len(tokens) < num_tokens and has_work(core):
        core.run_step(take)
        core.wait()
    return tokens


def num_computed(core: EngineCore) -> int:
    return int(core.metrics.snapshot().histograms["baton_engine_step_tokens",].total)


def test_a_lost_request_continues_with_a_load(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    request = engine_request("a", tuple(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True)
    with opened(url) as lost, opened(url) as other:
        before = run(lost, request, 90)
        lost.finish_saves(10.0)
        num_known = len(PROMPT) + len(before)

        progress = (CandidateProgress(0, tuple(before)),)
        after = run(other, changed(request, progress=progress), 1)
        assert num_computed(other) <= num_known % BLOCK_SIZE + 9 * BLOCK_SIZE
        assert len(list(tmp_path.glob("kv/objects/*/*"))) * BLOCK_SIZE > num_known - 9 * BLOCK_SIZE
        while other.scheduler.num_unfinished:
            other.run_step(lambda outputs: after.extend(t for o in outputs for t in o.token_ids))
            other.wait()
    assert [*before, *after] == reference_greedy(tiny_checkpoint("llama"), PROMPT, NUM_TOKENS)
