"""Logits processors for tests, and the same changes of logits written plainly."""

import ctypes
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.runtime.draws.logits_processors import LogitsProcessor, ProcessedRow, ProcessorContext

__all__ = ["FAULTS", "FLAG", "CountPenalty", "Faulty", "Hang", "Steer", "processed_logits"]

FLAG = tuple(f"tests.support.logits_processors:{name}" for name in ("Steer", "CountPenalty"))


class Steer(LogitsProcessor):
    """Adds 2 to the logits of every `args["steer"]`-th token. Has no state."""

    def applies_to(self, args: Mapping[str, Any]) -> bool:
        if "steer" not in args:
            return False
        if not isinstance(args["steer"], int) or args["steer"] < 1:
            raise ValueError(f"steer is {args['steer']!r}; it must be an integer above 0")
        return True

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        for index, row in enumerate(rows):
            logits[index, :: row.args["steer"]] += 2


class CountPenalty(LogitsProcessor[int]):
    """Subtracts `args["count_penalty"]` once per occurrence of a token in the output.

    Its state is a table with a row per sequence, and the number of tokens that it has counted.
    """

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        shape = context.max_rows, context.vocab_size
        self.counts = torch.zeros(shape, device=context.device)

    def applies_to(self, args: Mapping[str, Any]) -> bool:
        return "count_penalty" in args

    def new_state(self, row: ProcessedRow[int]) -> int:
        self.counts[row.row] = 0
        return -1  # no call of `apply` yet

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessedRow[int]]) -> None:
        assert logits.shape == (len(rows), self.context.vocab_size)
        for row in rows:
            assert len(row.output_token_ids) > row.state, "a call gets no new token"
            for token in row.output_token_ids[max(row.state, 0) :]:
                self.counts[row.row, token] += 1
            row.state = len(row.output_token_ids)
        penalties = logits.new_tensor([[row.args["count_penalty"]] for row in rows])
        logits -= penalties * self.counts[[row.row for row in rows]]


class Hang(LogitsProcessor):
    """Hangs for good in one step of one process, if the file `args["hang"]` exists, once there are
    `args["after"]` tokens.

    While it hangs, no other thread runs if the file contains "lock".
    """

    def applies_to(self, args: Mapping[str, Any]) -> bool:
        return "hang" in args

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        for row in rows:
            if len(row.output_token_ids) < row.args["after"]:
                continue
            path = Path(row.args["hang"])
            try:
                what = path.read_text()
                path.unlink()  # only one process can
            except FileNotFoundError:
                continue
            if what == "lock":
                ctypes.PyDLL(None).sleep(3600)  # does not release Python's global lock
            threading.Event().wait()


FAULTS = ("raise", "raise in new_state", "nan", "inf", "none left", "shape")


class Faulty(LogitsProcessor):
    """Does what `args["fault"]` says, once there are `args["after"]` tokens."""

    def applies_to(self, args: Mapping[str, Any]) -> bool:
        if args.get("fault") == "raise in applies_to":
            raise RuntimeError("as the test asked")
        return "fault" in args

    def new_state(self, row: ProcessedRow) -> None:
        if row.args["fault"] == "raise in new_state":
            raise RuntimeError("as the test asked")

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        for row_logits, row in zip(logits, rows, strict=True):
            if len(row.output_token_ids) < row.args["after"]:
                continue
            match row.args["fault"]:
                case "raise":
                    logits.fill_(0)
                    raise RuntimeError("as the test asked")
                case "nan":
                    row_logits[3] = torch.nan
                case "inf":
                    row_logits[3] = torch.inf
                case "none left":
                    row_logits.fill_(-torch.inf)
                case "shape":
                    logits.unsqueeze_(0)


def processed_logits(
    logits: torch.Tensor, args: Mapping[str, Any] | None, output_token_ids: Sequence[int]
) -> torch.Tensor:
    """Returns `[vocab]` logits as `Steer`, then `CountPenalty` change them."""
    logits = logits.clone()
    if args and "steer" in args:
        logits[:: args["steer"]] += 2
    if args and "count_penalty" in args:
        for token, count in Counter(output_token_ids).items():
            logits[token] -= torch.tensor(args["count_penalty"]) * count
    return logits
