"""Continuous batching of transformers as a worker."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers_worker import load_model
from worker_loop import Request, Result, work

_KV_TOKENS = 32_768
_MAX_BATCH_TOKENS = 2048
_NO_TOKEN = -1
_POLL_S = 1.0


class ContinuousBatchingEngine:
    """A model and its batching manager, whose thread computes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = f"transformers {transformers.__version__} continuous batching"
        torch.set_num_threads(args.num_threads)
        self._manager = _start(load_model(args))

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Runs the requests."""
        started = time.perf_counter()
        for index, request in enumerate(requests):
            self._manager.add_request(
                request.prompt_token_ids,
                request_id=str(index),
                max_new_tokens=request.num_output_tokens,
                record_timestamps=True,
            )
        results = [Result() for _ in requests]
        for _ in requests:
            output = self._next_output()
            times_s = [stamp - started for stamp in output.timestamps]
            results[int(output.request_id)] = Result(output.generated_tokens, times_s)
        return results

    def reset(self) -> None:
        """Does nothing: the manager has no such call, and a new one would be cold."""

    def _next_output(self) -> Any:
        while self._manager.is_running():
            output = self._manager.get_result(timeout=_POLL_S)
            if output is not None and output.is_finished():
                if output.error is not None:
                    raise RuntimeError(output.error)
                return output
        raise RuntimeError("the generation thread has ended")


def _start(model: transformers.PreTrainedModel) -> Any:
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=_NO_TOKEN),
        ContinuousBatchingConfig(
            num_blocks=_KV_TOKENS // ContinuousBatchingConfig.page_size,
            max_batch_tokens=_MAX_BATCH_TOKENS,
        ),
    )
    manager.warmup()
    manager.start()
    return manager


if __name__ == "__main__":
    work(__doc__, ContinuousBatchingEngine)
