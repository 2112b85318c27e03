"""llama.cpp as a worker: its low-level interface, with continuous batching over one `llama_batch`.

A step computes the next token of every sequence that decodes, and prompts in the rest of the
batch, as llama.cpp's server does. Prompts share nothing: its server finds a prefix only in the
slot that a request gets.
"""

import argparse
import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from worker_loop import Request, Result, StepOutput, run_stepped, work

_MAX_SEQUENCES = 64
_MAX_BATCHED_TOKENS = 2048
"""The same as for the other engines; llama.cpp computes them in parts of 512, its default."""
_KV_TOKENS = 32_768
_SEQUENCE_TOKENS = 512
"""Sequences get an equal part of the KV cache each, a multiple of this that holds the longest.

Its server has the same by default, with as many slots as it is told. One cache for all sequences
(`kv_unified`) gave three quarters of the throughput on 48 requests.
"""
_ALL = -1


@dataclass(slots=True)
class _Sequence:
    """A running request.

    Attributes:
        index: the request's.
        number: the number of its sequence in the KV cache.
        pending: its tokens that are still to compute: of the prompt, then the one drawn last.
        num_left: tokens that it still generates.
        num_computed: number of its tokens that are computed.
    """

    index: int
    number: int
    pending: list[int]
    num_left: int
    num_computed: int = 0


class _Batch:
    """A `llama_batch` over arrays that steps fill."""

    def __init__(self, max_tokens: int) -> None:
        self._tokens, self._positions, self._numbers = np.zeros((3, max_tokens), np.int32)
        self._counts = np.ones(max_tokens, np.int32)
        self._has_logits = np.zeros(max_tokens, np.int8)
        pointer = ctypes.POINTER(ctypes.c_int32)
        first, step = self._numbers.ctypes.data, self._numbers.itemsize
        rows = (ctypes.cast(first + step * row, pointer) for row in range(max_tokens))
        self._batch = llama_cpp.llama_batch(
            token=self._tokens.ctypes.data_as(pointer),
            pos=self._positions.ctypes.data_as(pointer),
            n_seq_id=self._counts.ctypes.data_as(pointer),
            seq_id=(pointer * max_tokens)(*rows),
            logits=self._has_logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self.num_tokens = 0

    def add(self, sequence: _Sequence, num_tokens: int, *, all_logits: bool = False) -> int:
        """Adds the next tokens of a sequence; returns the row of the last one.

        That row has logits if it is the sequence's last one, and all rows have if `all_logits`.
        """
        start, end = self.num_tokens, self.num_tokens + num_tokens
        self._tokens[start:end] = sequence.pending[:num_tokens]
        self._positions[start:end] = np.arange(num_tokens) + sequence.num_computed
        self._numbers[start:end] = sequence.number
        del sequence.pending[:num_tokens]
        sequence.num_computed += num_tokens
        self._has_logits[start:end] = all_logits
        self._has_logits[end - 1] = not sequence.pending
        self.num_tokens = end
        return end - 1

    def decode(self, context: Any) -> None:
        """Computes the batch, and empties it.

        Raises:
            RuntimeError: llama.cpp fails.
        """
        self._batch.n_tokens = self.num_tokens
        self.num_tokens = 0
        if status := llama_cpp.llama_decode(context, self._batch):
            raise RuntimeError(f"llama_decode returned {status}")


class LlamaCppEngine:
    """A model and a context of llama.cpp."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            args.model.encode(), llama_cpp.llama_model_default_params()
        )
        if self._model is None:
            raise RuntimeError(f"llama.cpp cannot load {args.model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._num_threads = args.num_threads
        self._contexts: dict[int, Any] = {}
        self._use_context(_SEQUENCE_TOKENS)
        self._batch = _Batch(_MAX_BATCHED_TOKENS)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[_Sequence] = []

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Runs the requests, step by step."""
        self._use_context(max(len(r.prompt_token_ids) + r.num_output_tokens for r in requests))
        return run_stepped(self, requests)

    def reset(self) -> None:
        """Does nothing: the KV of a request is dropped at its end."""

    def add(self, index: int, request: Request) -> None:
        """Adds a request to the engine."""
        self._waiting.append((index, request))

    def step(self) -> Iterable[StepOutput]:
        """Computes one step; returns its outputs."""
        self._admit()
        drawing = []
        # Sequences that decode come first: they have one pending token each.
        for sequence in sorted(self._running, key=lambda sequence: len(sequence.pending) > 1):
            num_tokens = min(len(sequence.pending), _MAX_BATCHED_TOKENS - self._batch.num_tokens)
            if num_tokens:
                row = self._batch.add(sequence, num_tokens)
                if not sequence.pending:
                    drawing.append((sequence, row))
        self._batch.decode(self._context)
        return [self._draw(sequence, row) for sequence, row in drawing]

    def write_logits(self, token_ids: Sequence[int], file: str) -> None:
        """Writes the logits after each token of a text to a file, `[num_tokens, vocab]` float32."""
        num_tokens = len(token_ids)
        context, batch = self._new_context(num_tokens, 1, num_tokens), _Batch(num_tokens)
        batch.add(_Sequence(0, 0, list(token_ids), 0), num_tokens, all_logits=True)
        batch.decode(context)
        logits = llama_cpp.llama_get_logits(context)
        np.ctypeslib.as_array(logits, (num_tokens, self._vocab_size)).tofile(file)
        llama_cpp.llama_free(context)

    def _use_context(self, num_tokens: int) -> None:
        """Selects the context for sequences of up to `num_tokens`, and makes it on its first use.

        Each case has requests of one class of lengths, and a first round that does not count.
        """
        parts = -(-num_tokens // _SEQUENCE_TOKENS)
        num_sequences = max(1, min(_MAX_SEQUENCES, _KV_TOKENS // (parts * _SEQUENCE_TOKENS)))
        if parts not in self._contexts:
            size = num_sequences * parts * _SEQUENCE_TOKENS
            self._contexts[parts] = self._new_context(size, num_sequences, num_sequences)
        self._context = self._contexts[parts]
        self._free = deque(range(num_sequences))

    def _new_context(self, num_tokens: int, num_sequences: int, num_outputs: int) -> Any:
        """Returns a context whose sequences have equal parts of the KV cache."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_batch = min(num_tokens, _MAX_BATCHED_TOKENS)
        params.n_seq_max = num_sequences
        params.n_outputs_max = num_outputs
        params.n_threads = params.n_threads_batch = self._num_threads
        params.swa_full = False  # as its server has it
        context = llama_cpp.llama_init_from_model(self._model, params)
        if context is None:
            raise RuntimeError(f"llama.cpp has no memory for {num_tokens} tokens")
        return context

    def _admit(self) -> None:
        """Gives waiting requests places in the KV cache."""
        while self._waiting and self._free:
            index, request = self._waiting.popleft()
            pending = list(request.prompt_token_ids)
            number = self._free.popleft()
            self._running.append(_Sequence(index, number, pending, request.num_output_tokens))

    def _draw(self, sequence: _Sequence, row: int) -> StepOutput:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        sequence.pending.append(token)
        sequence.num_left -= 1
        if not sequence.num_left:
            memory = llama_cpp.llama_get_memory(self._context)
            llama_cpp.llama_memory_seq_rm(memory, sequence.number, _ALL, _ALL)
            self._running.remove(sequence)
            self._free.append(sequence.number)
        return sequence.index, [token], not sequence.num_left


if __name__ == "__main__":
    work(__doc__, LlamaCppEngine)
