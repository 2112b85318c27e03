"""Pipeline stages that are threads and share a GPU, compared with `transformers`."""

import pytest

from engine.config import EngineConfig
from engine.runtime.model_runner import ModelRunner
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.devices import DEVICE, IS_CUDA
from tests.support.driven_requests import DrivenRequest, generate, scattered_tables
from tests.support.rank_threads import RankThreads

_NUM_TOKENS = 6
_NUM_BLOCKS = 96
_LENGTHS = (1, 16, 33)


# Threads share a CUDA context, in which none may wait for the device while another one captures.
@pytest.mark.parametrize("enforce_eager", [True] if IS_CUDA else [False, True])
def test_mixed_batches_give_the_tokens_of_transformers(enforce_eager: bool) -> None:
    path, threads = tiny_checkpoint("llama"), RankThreads()
    config = EngineConfig(
        model=str(path),
        dtype="float32",
        device=str(DEVICE),
        max_model_len=256,
        max_num_seqs=8,
        num_gpu_blocks_override=_NUM_BLOCKS,
        pipeline_parallel_size=3,
        enforce_eager=enforce_eager,
    )
    runner = ModelRunner(config, progress=False, ranks=threads.start(config, None))
    tables = scattered_tables(len(_LENGTHS), 5, 1, _NUM_BLOCKS)
    prompts = [prompt_of(length, seed=length) for length in _LENGTHS]
    requests = [
        DrivenRequest(tuple(prompt), row, own, first_step=row, chunk_size=12)
        for row, (prompt, own) in enumerate(zip(prompts, tables, strict=True))
    ]
    found = generate(runner, requests, _NUM_TOKENS)
    runner.close()
    threads.join()
    assert found == [reference_greedy(path, prompt, _NUM_TOKENS) for prompt in prompts]
