"""OpenVINO GenAI's continuous batching as a worker, stepped one by one.

optimum-intel has exported the model folder.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker_loop import Request, Result, StepOutput, run_stepped, work

_CACHE_GIB = 1
_MAX_BATCHED_TOKENS = 2048
"""The same as for the other engines. Its default of 256 was not faster."""
_PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}


class OpenVinoEngine:
    """A `ContinuousBatchingPipeline`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = f"openvino-genai {openvino_genai.__version__}"
        self._pipeline = _load(args)
        self._running: dict[int, tuple[Any, int]] = {}  # handle, tokens still to come

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Runs the requests, step by step."""
        return run_stepped(self, requests)

    def reset(self) -> None:
        """Does nothing: the pipeline has no such call, and a new one would be cold."""

    def add(self, index: int, request: Request) -> None:
        """Adds a request to the engine."""
        config = openvino_genai.GenerationConfig(
            max_new_tokens=request.num_output_tokens, ignore_eos=True, do_sample=False
        )
        prompt = openvino.Tensor(np.array([request.prompt_token_ids], dtype=np.int64))
        handle = self._pipeline.add_request(index, prompt, config)
        self._running[index] = (handle, request.num_output_tokens)

    def step(self) -> Iterable[StepOutput]:
        """Computes one step; returns its outputs."""
        self._pipeline.step()
        return [output for index in list(self._running) for output in self._read(index)]

    def _read(self, index: int) -> Iterable[StepOutput]:
        handle, num_left = self._running[index]
        if handle.can_read():
            (output,) = handle.read().values()
            num_left -= len(output.generated_ids)
            self._running[index] = (handle, num_left)
            yield index, output.generated_ids, num_left == 0
        elif handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
            raise RuntimeError(f"request {index} ended {num_left} tokens early")
        if num_left == 0:
            del self._running[index]


def _load(args: argparse.Namespace) -> Any:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = _CACHE_GIB
    scheduling.max_num_batched_tokens = _MAX_BATCHED_TOKENS
    scheduling.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": args.num_threads}
    if args.dtype != "auto":
        for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"):
            properties[name] = _PRECISIONS[args.dtype]
    return openvino_genai.ContinuousBatchingPipeline(args.model, scheduling, "CPU", properties)


if __name__ == "__main__":
    work(__doc__, OpenVinoEngine)
