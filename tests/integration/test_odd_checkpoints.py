"""Checkpoints in odd forms give the tokens of `transformers`."""

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers

from engine.models.part import ModelPart
from engine.runtime.weights.loader import load_model
from kernels.library.commands import library
from tests.support.checkpoints import prompt_of, reference_greedy
from tests.support.odd_checkpoints import (
    ABSENT,
    EMBEDDINGS,
    WEIGHTS,
    Tensors,
    both,
    config,
    odd_checkpoint,
    other_head,
    weights,
    without_embedding,
)
from tests.support.odd_forms import LENGTHS, LOADED, ONE
from tests.support.paged_session import PagedSession
from tests.support.rank_engines import check_handed_over, tiers
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request

NUM_TOKENS = 6


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("form", LOADED)
def test_an_odd_form_gives_the_tokens_of_transformers(form: str, tmp_path: Path) -> None:
    variant, change = LOADED[form]
    folder = odd_checkpoint(variant, change, tmp_path)
    prompt = prompt_of(43, seed=5)
    model = load_model(str(folder), "float32", "cpu", progress=False)
    session = PagedSession(model, (len(prompt) + NUM_TOKENS,))
    drawn: list[int] = []
    for _ in range(NUM_TOKENS):
        (logits,) = session.step([(0, drawn[-1:] or prompt)])
        drawn.append(int(logits[-1].argmax()))
    assert drawn == reference_greedy(folder, prompt, NUM_TOKENS)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    "form",
    [
        *LENGTHS,
        "another head, llama_tied_biased",
        "another head, gpt2",
        "another head, opt",
        "only the head, qwen2",
    ],
)
def test_an_odd_form_is_split_over_two_tiers(form: str, tmp_path: Path) -> None:
    folder = odd_checkpoint(*LOADED[form], tmp_path)
    with tiers(folder, {}, {}, kv_connector=f"memory://{tmp_path.name}", block_size=8) as split:
        check_handed_over(folder, split)


@pytest.mark.skipif(library() is None, reason="no native kernels")
@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("flag", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_have_the_head_that_differs_from_the_embedding(flag: str, tmp_path: Path) -> None:
    change = both(other_head(), config(num_hidden_layers=2))
    folder = odd_checkpoint("llama_tied_biased", change, tmp_path)
    prompt = tuple(prompt_of(20))
    with closing(build_core(folder, "both", block_size=8, **{flag: 2})) as core:
        outputs = run_all(core, [engine_request("one", prompt, max_tokens=NUM_TOKENS)])
    assert tokens_of(outputs["one"]) == reference_greedy(folder, prompt, NUM_TOKENS)


def test_every_stage_reads_the_embedding_from_the_head(tmp_path: Path) -> None:
    folder = odd_checkpoint("opt", without_embedding(EMBEDDINGS["opt"]), tmp_path)
    for stage in (0, 2):
        part = ModelPart(stage=stage, num_stages=3)
        loaded = load_model(str(folder), "auto", "cpu", progress=False, part=part)
        assert loaded.model.word_embedding is not None


@pytest.mark.parametrize("shared", [False, True])
def test_processes_share_a_head_that_differs_from_the_embedding(
    shared: bool, tmp_path: Path
) -> None:
    """A file of shared weights is not taken for that of the tied model."""
    folder = odd_checkpoint("llama_tied_biased", other_head(), tmp_path)
    prompt = tuple(prompt_of(20))
    flags = {"weights_folder": str(tmp_path)} if shared else {}
    for _ in range(2):
        with closing(build_core(folder, "both", **flags)) as core:
            outputs = run_all(core, [engine_request("one", prompt, max_tokens=NUM_TOKENS)])
        assert tokens_of(outputs["one"]) == reference_greedy(folder, prompt, NUM_TOKENS)


@pytest.mark.parametrize(
    "stored",
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float16"), ("int8", "float16")],
)
def test_without_a_stated_dtype_it_is_that_of_the_first_weights(
    stored: tuple[str, str], tmp_path: Path
) -> None:
    """The first tensor by name has another type than the others; integers do not count."""
    first, others = (getattr(torch, name) for name in stored)

    def narrowed(tensors: Tensors) -> Tensors:
        narrow = {name: tensor.to(others) for name, tensor in tensors.items()}
        if not first.is_floating_point:
            return narrow | {"a.position_ids": ONE.to(first)}
        return narrow | {min(tensors): tensors[min(tensors)].to(first)}

    change = both(weights(narrowed), config(dtype=ABSENT))
    folder = odd_checkpoint("llama", change, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    assert f"torch.{load_model(str(folder), 'auto', 'cpu', progress=False).dtype}" == str(theirs)


@pytest.mark.parametrize(("stated", "expected"), [("half", "float16"), ("float", "float32")])
def test_types_have_two_names(stated: str, expected: str, tmp_path: Path) -> None:
    folder = odd_checkpoint("llama", config(dtype=stated), tmp_path)
    assert load_model(str(folder), "auto", "cpu", progress=False).dtype == expected


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ("another head, qwen2", ["tie_word_embeddings", "lm_head.weight", WEIGHTS]),
        ("layers beyond the last, llama", ["num_hidden_layers 2", "9 tensors"]),
        ("a tensor in two files", ["b.safetensors", "a.safetensors"]),
    ],
)
def test_what_is_not_used_as_config_json_says_is_logged(
    form: str, parts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = odd_checkpoint(*LOADED[form], tmp_path)
    with caplog.at_level(logging.WARNING, "baton.engine"):
        load_model(str(folder), "auto", "cpu", progress=False)
    assert all(part in caplog.text for part in parts)
