"""transformers' `generate` as a worker: one left-padded batch, as long as its longest answer."""

import argparse
import time
from collections.abc import Sequence

import torch
import transformers
from transformers.generation.streamers import BaseStreamer
from worker_loop import Request, Result, work

_PAD_TOKEN_ID = 0  # its positions are masked


class GenerateEngine:
    """A model with static batching: ended requests stay until all have ended."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = f"transformers {transformers.__version__} generate"
        torch.set_num_threads(args.num_threads)
        self._model = load_model(args)

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Runs the requests as one batch."""
        width = max(len(request.prompt_token_ids) for request in requests)
        paddings = [width - len(request.prompt_token_ids) for request in requests]
        input_ids = torch.tensor(
            [
                [_PAD_TOKEN_ID] * padding + request.prompt_token_ids
                for request, padding in zip(requests, paddings, strict=True)
            ],
            device=self._model.device,
        )
        mask = torch.tensor(
            [[0] * padding + [1] * (width - padding) for padding in paddings],
            device=self._model.device,
        )
        clock = _StepClock()
        output = self._model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=max(request.num_output_tokens for request in requests),
            do_sample=False,
            streamer=clock,
        )
        rows = output[:, width:].tolist()
        counts = [request.num_output_tokens for request in requests]
        return [
            Result(row[:count], clock.times_s[:count])
            for row, count in zip(rows, counts, strict=True)
        ]

    def reset(self) -> None:
        """Does nothing: `generate` has no prefix cache."""


class _StepClock(BaseStreamer):
    """Records the time of each step's tokens, in seconds since its construction."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._started = time.perf_counter()
        self._has_seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Is called with the prompt first, then with one token per sequence."""
        if self._has_seen_prompt:
            self.times_s.append(time.perf_counter() - self._started)
        self._has_seen_prompt = True

    def end(self) -> None:
        """Does nothing: no tokens are buffered."""


def load_model(args: argparse.Namespace) -> transformers.PreTrainedModel:
    """Returns the checkpoint's model, without tokens that end a sequence."""
    dtype = getattr(torch, args.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = _PAD_TOKEN_ID
    return model.to(args.device).eval()


if __name__ == "__main__":
    work(__doc__, GenerateEngine)
