"""vLLM for CPU as a worker: its engine in this process, stepped one by one."""

import argparse
from collections.abc import Iterable, Sequence

import vllm
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind
from worker_loop import Request, Result, StepOutput, run_stepped, work


class VllmEngine:
    """An `LLMEngine` with default settings, on the fastest executor for one process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = f"vllm {vllm.__version__}"
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=args.model,
                dtype=args.dtype,
                max_model_len=args.max_model_len,
                skip_tokenizer_init=True,
                distributed_executor_backend="uni",
                disable_log_stats=True,
            )
        )

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Runs the requests, step by step."""
        return run_stepped(self, requests)

    def reset(self) -> None:
        """Empties the prefix cache."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def add(self, index: int, request: Request) -> None:
        """Adds a request to the engine."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request.prompt_token_ids}
        self._engine.add_request(str(index), prompt, params)

    def step(self) -> Iterable[StepOutput]:
        """Computes one step; returns its outputs."""
        return [
            (int(output.request_id), output.outputs[0].token_ids, output.finished)
            for output in self._engine.step()
        ]


if __name__ == "__main__":
    work(__doc__, VllmEngine)
