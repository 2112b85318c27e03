"""Compiles the kernels of a model side by side, before its first step would do so one by one.

Triton compiles a kernel where it is first launched, mostly without the interpreter's lock. So each
of several threads runs another part of a step, on inputs of its own. What they leave out is
compiled by the warm-up behind them; what a later start finds on disk is not compiled again.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import kernels
from baton.common.request.sampling_params import SamplingParams
from engine.draw_params import DrawParams
from engine.runtime.device import current, wait_for
from engine.runtime.draws.rules import RowRules
from engine.runtime.draws.sampler import draw_record, draw_table
from kernels import DRAW_RECORD

__all__ = ["compile_ahead", "draw_once"]

_NUM_DRAWS = 2
_FILTERED = DrawParams(SamplingParams(top_k=50, top_p=0.9), seed=0)

_logger = logging.getLogger("baton.engine")


def compile_ahead(parts: Mapping[str, Callable[[], object]], device: torch.device) -> None:
    """Runs parts of a step at the same time; logs how long that took.

    A part that fails is logged and left: the step that it is a part of runs next, and says why.

    Args:
        parts: functions that launch kernels, each on inputs of its own, by name.
        device: the GPU.
    """
    started = time.perf_counter()

    def run(name: str) -> None:
        try:
            with current(device), torch.inference_mode():
                parts[name]()
        except Exception as error:
            _logger.info("kernels of %s were not compiled ahead: %s", name, error)

    with ThreadPoolExecutor(len(parts), "compile") as threads:
        list(threads.map(run, parts))
    wait_for(device)
    seconds = time.perf_counter() - started
    _logger.info("kernels are compiled, or found on disk, after %.1f s", seconds)


def draw_once(vocab_size: int, device: torch.device) -> None:
    """Draws tokens in every way in which steps do, from logits at addresses of either alignment:
    those of decoding rows may follow those of chunks.

    Args:
        vocab_size: number of tokens.
        device: the GPU.
    """
    draws = draw_table(np.array([draw_record(_FILTERED)] * _NUM_DRAWS, DRAW_RECORD), device)
    ids = torch.arange(_NUM_DRAWS, device=device)
    logits = torch.zeros(_NUM_DRAWS + 1, vocab_size, device=device)
    for rows in (logits[:_NUM_DRAWS], logits[1:]):
        maxima, likeliest = kernels.row_maxima(rows)
        for logit_rows in (None, ids):
            for is_filtered in (False, True):
                kernels.draw_tokens(
                    rows,
                    maxima,
                    likeliest,
                    draws,
                    draw_ids=ids,
                    positions=ids,
                    logit_rows=logit_rows,
                    filtered=is_filtered,
                )
    RowRules(1, 1, vocab_size, device).warm_up()
