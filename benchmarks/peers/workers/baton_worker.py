"""Baton's offline engine as a worker: the core of `baton.LLM`, stepped one by one."""

import argparse
from collections.abc import Iterable, Sequence

from worker_loop import Request, Result, StepOutput, run_stepped, work

from baton import __version__
from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from engine.config import EngineConfig
from engine.loop.build import build_engine
from engine.request import EngineOutput, EngineRequest


class BatonEngine:
    """An `EngineCore` with default flags but for those of the comparison."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = f"baton {__version__}"
        self._core = build_engine(
            EngineConfig(
                model=args.model,
                dtype=args.dtype,
                num_threads=args.num_threads,
                max_model_len=args.max_model_len,
                device=args.device,
                quantized_compute=args.quantized_compute,
            )
        )

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Runs the requests, step by step."""
        return run_stepped(self, requests)

    def reset(self) -> None:
        """Empties the prefix cache."""
        self._core.scheduler.reset_prefix_cache()

    def add(self, index: int, request: Request) -> None:
        """Adds a request to the engine."""
        engine_request = EngineRequest(
            spec=RequestSpec(
                request_id=str(index),
                prompt_token_ids=tuple(request.prompt_token_ids),
                params=SamplingParams(
                    temperature=0.0, seed=0, max_tokens=request.num_output_tokens
                ),
            )
        )
        self._core.check(engine_request)
        self._core.scheduler.add(engine_request)

    def step(self) -> Iterable[StepOutput]:
        """Computes one step; returns its outputs."""
        outputs: list[EngineOutput] = []
        self._core.run_step(outputs.extend)
        return [(int(o.request_id), o.token_ids, o.finish_reason is not None) for o in outputs]


if __name__ == "__main__":
    work(__doc__, BatonEngine)
