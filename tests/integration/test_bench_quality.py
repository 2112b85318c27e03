"""Quality of quantized forms: divergences, logits of whole texts, checkpoints as GGUF files."""

import math

import pytest
import torch

from baton.common.errors import ConfigurationError
from baton.common.model_files.files import open_model_files
from baton.common.model_files.named_models import demo_model_path
from benchmarks.gguf_export import export_gguf
from benchmarks.model_shape import read_shape
from benchmarks.quality.divergence import Divergence
from benchmarks.quality.sources import BatonSource
from benchmarks.quality.texts import token_texts
from engine.config import EngineConfig
from tests.support.checkpoints import prompt_of, reference_model, tiny_checkpoint


def test_a_divergence_is_of_the_base_and_its_error_is_over_texts():
    base, other = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    gathered = Divergence()
    gathered.add(base.log(), other.log() + 3)  # logits are distributions up to a sum
    gathered.add(torch.cat([base, base]).log(), torch.cat([base, 1 - base]).log())
    figures = gathered.figures()
    flipped = 0.5 * math.log(3)
    assert figures.mean == pytest.approx((expected + flipped) / 3)
    assert figures.error == pytest.approx(abs(expected - flipped / 2) / 2)
    assert figures.p99 == pytest.approx(flipped, rel=0.02)
    assert (figures.agreement, figures.num_positions) == (pytest.approx(2 / 3), 3)


def test_logits_of_a_text_are_those_of_transformers():
    folder = tiny_checkpoint("gemma3")  # its layers have two kinds of attention, so two blocks each
    source = BatonSource(EngineConfig(model=str(folder), dtype="float32", device="cpu"))
    text = prompt_of(41)
    with torch.no_grad():
        expected = reference_model(folder)(torch.tensor([text])).logits[0]
    logits = source.logits(text)
    assert logits.shape == (41, source.vocab_size)
    assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()
    assert torch.equal(source.logits(text[:9]), logits[:9])


def test_texts_are_as_long_as_wanted_and_too_many_are_refused():
    tokenizer = open_model_files("demo").load_tokenizer()
    texts = token_texts(tokenizer, 3, 50)
    assert [len(text) for text in texts] == [50] * 3
    assert len({tuple(text) for text in texts}) == 3
    with pytest.raises(ConfigurationError, match=r"--num-texts is 999; Python has \d+ help topics"):
        token_texts(tokenizer, 999, 50)


@pytest.mark.parametrize("variant", ["llama_tied_biased", "qwen2", "qwen3_untied"])
def test_an_exported_checkpoint_computes_what_its_folder_does(variant, tmp_path):
    folder, file = tiny_checkpoint(variant), tmp_path / "model.gguf"
    export_gguf(folder, file)
    expected, found = (
        BatonSource(EngineConfig(model=str(path), dtype="float32", device="cpu"))
        for path in (folder, file)
    )
    assert torch.equal(expected.logits(prompt_of(9)), found.logits(prompt_of(9)))


def test_an_exported_checkpoint_has_its_tokens_and_type(tmp_path):
    file = tmp_path / "model.gguf"
    export_gguf(demo_model_path(), file)
    tokenizer = open_model_files(demo_model_path()).load_tokenizer()
    tokens = open_model_files(file).header.tokens
    assert tokens == [tokenizer.id_to_token(token_id) for token_id in range(len(tokens))]
    assert open_model_files(file).load_tokenizer().get_vocab_size() == len(tokens)
    shape, dtype = read_shape(EngineConfig(model=str(file)))
    assert dtype == "bfloat16"  # in which the folder has its weights
    # Norms, which the file has in float32, are a small part of the weights.
    assert shape.bytes_per_weight == pytest.approx(2, rel=0.01)


def test_a_checkpoint_of_another_family_is_not_exported(tmp_path):
    with pytest.raises(ConfigurationError, match="model_type is 'gemma3_text'"):
        export_gguf(tiny_checkpoint("gemma3"), tmp_path / "model.gguf")


def test_a_step_reads_a_tied_head_but_no_embedding_that_is_none(tmp_path):
    sizes = {}
    for variant in ("qwen3", "qwen3_untied"):
        file = tmp_path / f"{variant}.gguf"
        export_gguf(tiny_checkpoint(variant), file)
        shape, _ = read_shape(EngineConfig(model=str(file)))
        num_weights = shape.num_body_weights + shape.num_head_weights
        sizes[variant] = shape.bytes_per_weight * num_weights
        tensors = open_model_files(file).header.tensors
        embedding = 4 * math.prod(tensors["token_embd.weight"].shape)
        all_bytes = sum(4 * math.prod(tensor.shape) for tensor in tensors.values())
        assert sizes[variant] == all_bytes - embedding * (variant == "qwen3_untied")
