"""A token's result has the same bits in any batch and on any number of threads.

Therefore split engines draw the tokens of an undivided one, a replica that resumes a request
draws the tokens of the first, and a prompt may be computed in chunks of any size.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

import kernels
from kernels import Activation, NormKind, WeightUse
from tests.support.attention_cases import make_case
from tests.support.checkpoints import prompt_of
from tests.support.kernel_checks import DTYPES, filled_weight, native_only, normal, on_threads
from tests.support.paged_batches import step_metadata
from tests.support.paged_session import PagedSession, loaded

pytestmark = native_only("torch's sums depend on the size of a batch")

LAYERS = ["linear", "head", "gated", "capped", "norm", "layer norm", "post norm"]
ROW_RANGES = [(first, first + count) for count in (*range(1, 30), 48, 60) for first in (0, 40)]
CAP_AND_SINKS = {"soft_cap": 2.0, "has_sinks": True}
SEQ_LEN = 330
CHUNKS = [*[(start, 1) for start in (0, 1, 63, 64, 127, 128, 200, 329)], (1, 2), (60, 9)]
CHUNKS += [(0, 130), (100, 64), (127, 3), (5, 320), (129, 200)]


def layers(dtype):
    """Operations on rows, by name."""
    plain = filled_weight(normal(75, 90, dtype=dtype))
    gated = filled_weight(normal(66, 90, dtype=dtype), WeightUse.GATED_LINEAR)
    bias, residual = normal(75, dtype=dtype, seed=1), normal(100, 75, dtype=dtype, seed=2)
    norm = normal(90, dtype=dtype, seed=3)
    return {
        "linear": lambda rows, part: kernels.linear(rows, plain, bias, residual[part]),
        "head": lambda rows, part: kernels.linear(rows, plain, out_dtype=torch.float32),
        "gated": lambda rows, part: kernels.linear_gated(rows, gated, None, Activation.SILU),
        "capped": lambda rows, part: kernels.linear(
            rows, plain, bias, activation=Activation.GELU_TANH, scale=3.0, cap=2.0
        ),
        "norm": lambda rows, part: kernels.rms_norm(rows, norm, 1e-5),
        "layer norm": lambda rows, part: kernels.layer_norm(rows, norm, norm, 1e-5, rows),
        "post norm": lambda rows, part: kernels.rms_norm(
            rows, norm, 1e-5, kind=NormKind.OFFSET, residual=rows
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_row_does_not_depend_on_other_rows(name, dtype):
    run, hidden = layers(dtype)[name], normal(100, 90, dtype=dtype, seed=4)
    whole = run(hidden, slice(None))
    for first, end in ROW_RANGES:
        part = slice(first, end)
        assert torch.equal(run(hidden[part], part), whole[part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_row_does_not_depend_on_the_number_of_threads(name, dtype):
    run, hidden = layers(dtype)[name], normal(100, 90, dtype=dtype, seed=4)
    results = on_threads([1, 2, 3, 7], lambda: run(hidden, slice(None)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sliding_window", [None, 1, 40, 128, 200])
@pytest.mark.parametrize(
    ("heads", "rule"), [((6, 2), {}), ((6, 2), CAP_AND_SINKS), ((7, 1), {}), ((2, 2), {})]
)
def test_attention_of_a_token_does_not_depend_on_its_chunk(heads, rule, sliding_window, dtype):
    case = make_case(
        [(0, SEQ_LEN)], num_heads=heads[0], num_kv_heads=heads[1], head_dim=40, dtype=dtype, **rule
    )
    whole, table = case.attend(sliding_window), case.meta.block_tables[0].tolist()
    for start, length in CHUNKS:
        _, meta = step_metadata([(start, length)], [table], block_size=4)
        chunk = slice(start, start + length)
        part = replace(case, query=case.query[chunk], meta=meta)
        assert torch.equal(part.attend(sliding_window), whole[chunk]), (start, length)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sliding_window", "rule"), [(None, CAP_AND_SINKS), (None, {}), (40, {})])
def test_attention_of_a_token_does_not_depend_on_other_sequences(sliding_window, rule, dtype):
    spans = [(100, 1), (0, 140), (300, 3), (7, 1), (64, 64)]
    case = make_case(spans, head_dim=40, dtype=dtype, **rule)
    together = case.attend(sliding_window).split([length for _, length in spans])
    tables = case.meta.block_tables.tolist()
    queries = case.query.split([length for _, length in spans])
    for order in ([0], [1], [2], [3], [4], [4, 3], [2, 0, 1], [3, 1, 4, 0, 2]):
        _, meta = step_metadata([spans[i] for i in order], [tables[i] for i in order], block_size=4)
        query = torch.cat([queries[i] for i in order])
        expected = torch.cat([together[i] for i in order])
        assert torch.equal(replace(case, query=query, meta=meta).attend(sliding_window), expected)


VARIANTS = ["llama", "mistral_sliding", "qwen3_mostly_sliding", "lfm2", "qwen3_next"]
DTYPE_NAMES = ["float32", "bfloat16"]
PROMPT = prompt_of(150, seed=1)
NEIGHBOURS = [prompt_of(length, seed=length) for length in (140, 33, 90)]


def in_chunks(variant, dtype, chunk_size):
    session = PagedSession(loaded(variant, dtype), [len(PROMPT)])
    starts = range(0, len(PROMPT), chunk_size)
    steps = [session.step([(0, PROMPT[start : start + chunk_size])]) for start in starts]
    return torch.cat([logits for (logits,) in steps])


@cache
def whole(variant, dtype):
    """Logits of the prompt in one piece, `[tokens, vocab]`."""
    return in_chunks(variant, dtype, len(PROMPT))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize(
    ("variant", "chunk_size"),
    [
        *product(VARIANTS, [1, 7, 64, 149]),
        *[
            ("gemma3", 149),
            ("gemma4", 7),
            ("gemma4_moe", 64),
            ("olmo3", 7),
            ("granite", 149),
            ("phi3_partial", 7),
        ],
    ],
)
def test_a_prompt_in_chunks_has_the_logits_of_the_whole_prompt(variant, dtype, chunk_size):
    assert torch.equal(in_chunks(variant, dtype, chunk_size), whole(variant, dtype))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompts_logits_do_not_depend_on_other_prompts(variant, dtype):
    prompts = [*NEIGHBOURS, PROMPT]
    session = PagedSession(loaded(variant, dtype), [len(prompt) for prompt in prompts], seed=3)
    place = len(NEIGHBOURS)
    logits = []
    for start, length in ((0, 5), (5, 1), (6, 100), (106, 1), (107, 43)):
        # The other prompts advance by `index` more tokens per step, so they end one by one.
        work = [
            (index, prompt[session.done[index] :][: length + index])
            for index, prompt in enumerate(prompts[:place])
        ]
        work = [(index, tokens) for index, tokens in work if tokens]
        work.insert(1, (place, PROMPT[start : start + length]))
        logits.append(session.step(work)[1])
    assert torch.equal(torch.cat(logits), whole(variant, dtype))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompts_logits_do_not_depend_on_the_number_of_threads(variant, dtype):
    results = on_threads([1, 2, 5], lambda: in_chunks(variant, dtype, 75))
    assert all(torch.equal(result, whole(variant, dtype)) for result in results)
