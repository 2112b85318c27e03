"""llama.cpp's worker on a stand-in for its library: batches, places of sequences, KV."""

import ctypes
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from benchmarks.peers import peer_process

WORKERS = Path(peer_process.__file__).parent / "workers"
VOCAB = 50


class FakeLlama(ModuleType):
    """A library whose model draws, after each token, the next number."""

    __version__ = "1"

    def __init__(self):
        super().__init__("llama_cpp")
        self.steps, self.removed = [], []
        self._tokens = []

    class llama_batch(SimpleNamespace):  # noqa: N801 - the library's name
        n_tokens = 0

    def llama_decode(self, _context, batch):
        rows = range(batch.n_tokens)
        self._tokens = [batch.token[row] for row in rows]
        assert all(batch.n_seq_id[row] == 1 for row in rows)
        keys = [
            (batch.seq_id[row][0], batch.pos[row], batch.token[row], bool(batch.logits[row]))
            for row in rows
        ]
        self.steps.append(keys)
        return 0

    def llama_get_logits_ith(self, _context, row):
        assert self.steps[-1][row][3], "the row has logits"
        self._logits = np.eye(1, VOCAB, self._tokens[row] + 1, dtype=np.float32)[0]
        return self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def llama_memory_seq_rm(self, _memory, number, first, last):
        self.removed.append((number, first, last))

    def __getattr__(self, name):
        if not name.startswith("llama_"):
            raise AttributeError(name)
        return lambda *_: VOCAB if name == "llama_vocab_n_tokens" else SimpleNamespace()


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", FakeLlama())
    monkeypatch.syspath_prepend(WORKERS)
    yield import_module("llamacpp_worker")
    for name in ("llamacpp_worker", "worker_loop"):
        sys.modules.pop(name, None)


def engine_of(worker):
    return worker.LlamaCppEngine(SimpleNamespace(model="m.gguf", num_threads=1))


def test_sequences_decode_before_prompts_and_a_prompt_takes_the_rest_of_the_batch(
    worker, monkeypatch
):
    monkeypatch.setattr(worker, "_MAX_BATCHED_TOKENS", 4)
    request = worker.Request
    results = engine_of(worker).run([request([7, 8], 3), request([20, 21, 22, 23], 2)])
    assert [result.token_ids for result in results] == [[9, 10, 11], [24, 25]]
    library = sys.modules["llama_cpp"]
    assert library.steps == [
        [(0, 0, 7, False), (0, 1, 8, True), (1, 0, 20, False), (1, 1, 21, False)],
        [(0, 2, 9, True), (1, 2, 22, False), (1, 3, 23, True)],
        [(0, 3, 10, True), (1, 4, 24, True)],
    ]
    assert library.removed == [(0, -1, -1), (1, -1, -1)]


def test_requests_wait_for_a_part_of_the_kv_cache_that_holds_the_longest(worker, monkeypatch):
    monkeypatch.setattr(worker, "_SEQUENCE_TOKENS", 2)
    monkeypatch.setattr(worker, "_KV_TOKENS", 8)
    requests = [worker.Request([1, 2], 1), worker.Request([3], 1), worker.Request([4, 5], 1)]
    results = engine_of(worker).run(requests)
    assert [result.token_ids for result in results] == [[3], [4], [6]]
    first, second = sys.modules["llama_cpp"].steps
    assert [(number, token) for number, _, token, _ in first] == [(1, 3), (0, 1), (0, 2)]
    assert [(number, token) for number, _, token, _ in second] == [(1, 4), (1, 5)]
