"""The bundled demo model and the script that trains it."""

import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.common.model_files.named_models import DEMO_PROMPT, demo_model_path
from router.requests.tokenizer import Tokenizer

MIB = 1 << 20
SCRIPT = Path(__file__).parents[4] / "scripts" / "train_demo_model.py"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo_model_path()).eval()


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in demo_model_path().iterdir()) < 8 * MIB


def test_the_model_is_stored_in_16_bits_and_runs_in_float32(model):
    assert model.dtype == torch.float32
    weights_bytes = (demo_model_path() / "model.safetensors").stat().st_size
    assert weights_bytes < 2.1 * model.num_parameters()


def test_both_tokenizers_agree_on_the_prompt(model):
    token_ids = Tokenizer.load(demo_model_path()).encode(DEMO_PROMPT)
    assert token_ids == AutoTokenizer.from_pretrained(demo_model_path()).encode(DEMO_PROMPT)
    assert len(token_ids) > 32
    assert token_ids[0] == model.config.bos_token_id


def test_the_model_continues_the_prompt_in_english_words(model):
    tokenizer = Tokenizer.load(demo_model_path())
    prompt = tokenizer.encode(DEMO_PROMPT)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
    text = tokenizer.decode(output[0, len(prompt) :].tolist())
    assert text.isascii()
    known = set(re.findall(r"[a-z]+", " ".join(topics.values()).lower()))
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) > 12
    assert sum(word in known for word in words) > 0.8 * len(words)


def test_the_model_predicts_the_end_of_sequence_token(model):
    """The end-of-sequence token was trained, so it is likely after a finished sentence."""
    tokenizer = Tokenizer.load(demo_model_path())
    prompt = torch.tensor([tokenizer.encode("Return the number of items in the list.")])
    with torch.no_grad():
        probabilities = model(prompt).logits[0, -1].softmax(-1)
    assert probabilities[model.config.eos_token_id] > 0.05


@pytest.mark.slow
@pytest.mark.timeout(900)  # without AVX-512 it takes three times as long
def test_the_script_trains_and_writes_a_checkpoint(tmp_path):
    command = [sys.executable, SCRIPT, "--steps", "2", "--output", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=850)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 1_000_000
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(DEMO_PROMPT)) == DEMO_PROMPT
    assert "Step 2 of 2" in (tmp_path / "MODEL_CARD.md").read_text()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in demo_model_path().iterdir()}
