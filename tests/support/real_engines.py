"""Real engines on tiny checkpoints, stepped in the test's thread: whole, or split in two."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.batch import DrawParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import CandidateProgress, EngineRequest, FinishReason, RequestOutput

GREEDY = DrawParams(temperature=0, top_k=0, top_p=1, seed=0)
CHUNK_TOKENS = 16  # smaller than the longest prompts, so that those are chunked

Outputs = dict[str, list[RequestOutput]]


def build_core(path: Path, role: str, **overrides: object) -> EngineCore:
    settings = {
        "model": str(path),
        "role": role,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "num_gpu_blocks_override": 64,
    }
    return EngineCore.build(EngineConfig(**(settings | overrides)))


def run_all(core: EngineCore, requests: Sequence[EngineRequest]) -> Outputs:
    """Runs requests to their ends; checks that every block came back."""
    outputs: Outputs = {request.request_id: [] for request in requests}

    def take(step_outputs: Sequence[RequestOutput]) -> None:
        for output in step_outputs:
            outputs[output.request_id].append(output)

    for request in requests:
        core.check(request)
        take(core.add_request(request))
    while core.has_work:
        core.wait()
        take(core.step())
    core.scheduler.check()
    load = core.load()
    assert load.num_free_blocks == core.num_blocks
    assert load.num_swapped_blocks == 0
    return outputs


def tokens_of(outputs: Sequence[RequestOutput], index: int = 0) -> list[int]:
    """One candidate's tokens."""
    return [token for output in outputs if output.index == index for token in output.token_ids]


def hand_over(request: EngineRequest, outputs: Sequence[RequestOutput]) -> EngineRequest:
    """What the router makes of a prefill answer."""
    answer = outputs[-1]
    assert answer.finish_reason is FinishReason.HANDOFF
    assert answer.handoff is not None
    logprobs = answer.logprobs or (0.0,) * len(answer.token_ids)
    first_tokens = tuple(zip(answer.token_ids, logprobs, strict=True))
    if request.beam_search is not None:
        return replace(request, handoff=answer.handoff, first_beams=first_tokens)
    progress = tuple(
        CandidateProgress(index, (token_id,), logprob)
        for index, (token_id, logprob) in enumerate(first_tokens)
    )
    return replace(request, handoff=answer.handoff, progress=progress)
