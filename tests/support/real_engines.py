"""Real engines on tiny checkpoints, stepped in the test's thread: undivided or split in two."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from baton.common.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.loop.build import build_engine
from engine.loop.core import EngineCore
from engine.request import CandidateProgress, EngineOutput, EngineRequest, FinishReason
from tests.support.checkpoints import tiny_checkpoint
from tests.support.engine_work import has_work
from tests.support.prefill_core import with_role

CHUNK_TOKENS = 16  # smaller than the longest prompts, so that these are computed in chunks

Outputs = dict[str, list[EngineOutput]]


def build_core(
    path: Path, role: str, *, security: ClusterSecurity | None = None, **overrides: object
) -> EngineCore:
    settings = {
        "model": str(path),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "num_gpu_blocks_override": 64,
    }
    return with_role(build_engine(EngineConfig(**(settings | overrides)), security), role)


@contextmanager
def engine(variant: str = "llama", **flags: object) -> Iterator[EngineCore]:
    """An undivided engine with blocks of eight tokens; closes it."""
    defaults = {"block_size": 8, "num_gpu_blocks_override": 160, "max_num_seqs": 12}
    core = build_core(tiny_checkpoint(variant), "both", **(defaults | flags))
    try:
        yield core
    finally:
        core.close()


def run_all(core: EngineCore, requests: Sequence[EngineRequest]) -> Outputs:
    """Runs requests to their ends; checks that every block is free afterwards."""
    outputs: Outputs = {request.spec.request_id: [] for request in requests}

    def collect(step_outputs: Sequence[EngineOutput]) -> None:
        for output in step_outputs:
            outputs[output.request_id].append(output)

    for request in requests:
        core.check(request)
        collect(core.scheduler.add(request))
    core.run_step(collect)
    while has_work(core):
        core.wait()
        core.run_step(collect)
    core.scheduler.check()
    load = core.scheduler.load()
    assert load.num_free_blocks == core.num_blocks
    assert load.num_swapped_blocks == 0
    return outputs


def tokens_of(outputs: Sequence[EngineOutput], index: int = 0) -> list[int]:
    """Returns one candidate's tokens."""
    return [token for output in outputs if output.index == index for token in output.token_ids]


def hand_over(request: EngineRequest, outputs: Sequence[EngineOutput]) -> EngineRequest:
    """Returns the request that the router makes from a prefill engine's outputs."""
    answer = outputs[-1]
    assert answer.finish_reason is FinishReason.HANDOFF
    assert answer.handoff is not None
    (first,) = (output for output in outputs if output.token_ids)
    logprobs = first.first_logprobs or (0.0,) * len(first.token_ids)
    first_tokens = tuple(zip(first.token_ids, logprobs, strict=True))
    if request.spec.params.beam_width is not None:
        return replace(request, handoff=answer.handoff, first_beams=first_tokens)
    is_ranked = request.spec.params.is_ranked  # others' log-probabilities are the client's already
    progress = tuple(
        CandidateProgress(
            index, (token_id,), logprob, first.logprobs[index : index + 1] if is_ranked else ()
        )
        for index, (token_id, logprob) in enumerate(first_tokens)
    )
    return replace(request, handoff=answer.handoff, progress=progress)


class SplitRun:
    """A prefill and a decode engine, stepped in turn, with the messages of router and services.

    Decode prefetches saved blocks while prefill computes, then gets the handoff, which is
    released with decode's first output.

    Args:
        prefill: a prefill engine.
        decode: a decode engine.
        prefetches_saved: whether decode prefetches saved blocks.

    Attributes:
        handed: requests as decode received them, by id.
        prefilled: prefill's outputs by id.
        outputs: decode's outputs by id; prefill's for a prompt that failed there.
        num_reported: blocks reported before the handoff.
    """

    def __init__(
        self, prefill: EngineCore, decode: EngineCore, *, prefetches_saved: bool = True
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._prefetches_saved = prefetches_saved
        self._has_results = threading.Event()
        for core in (prefill, decode):
            core._connector.set_waker(self._has_results.set)
            core._grammars._on_compiled = self._has_results.set
        self.prefilled: Outputs = {}
        self.handed: dict[str, EngineRequest] = {}
        self.outputs: Outputs = {}
        self.num_reported = 0

    def run(self, requests: Sequence[EngineRequest]) -> None:
        """Runs requests until they have ended and every block is free on both sides."""
        self._requests = {request.spec.request_id: request for request in requests}
        for request in requests:
            self._prefill.check(request)
            self._on_prefill_outputs(self._prefill.scheduler.add(request))
        while not self._is_over():
            self._has_results.clear()
            self._prefill.run_step(self._on_prefill_outputs)
            self._decode.run_step(self._on_decode_outputs)
            if self._prefill.is_stalled and self._decode.is_stalled and not self._is_over():
                assert self._has_results.wait(30), "both engines are stalled"
        for core in (self._prefill, self._decode):
            core.scheduler.check()

    def _is_over(self) -> bool:
        cores = (self._prefill, self._decode)
        is_idle = not any(has_work(core) for core in cores)
        return is_idle and all(core.scheduler.kv.pool.num_free == core.num_blocks for core in cores)

    def _on_prefill_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            if output.saved is not None:
                self.num_reported += len(output.saved.block_keys)
                if self._prefetches_saved:
                    self._decode.scheduler.prefetch(output.saved)
                continue
            self.prefilled.setdefault(output.request_id, []).append(output)
            if output.error is not None:
                self.outputs[output.request_id] = [output]
            elif output.is_last:
                request = self._requests[output.request_id]
                handed = hand_over(request, self.prefilled[output.request_id])
                self.handed[output.request_id] = handed
                self._decode.check(handed)
                self._on_decode_outputs(self._decode.scheduler.add(handed))

    def _on_decode_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            if output.request_id not in self.outputs:
                handoff = self.handed[output.request_id].handoff
                self._prefill.scheduler.release_handoff(handoff.handoff_id)
            self.outputs.setdefault(output.request_id, []).append(output)
