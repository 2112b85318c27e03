"""No step compiles a kernel: an engine's warm-up launched every version that serving launches."""

import pytest
import torch

from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.devices import IS_CUDA
from tests.support.real_engines import build_core, run_all
from tests.support.requests import engine_request
from tests.support.runner_kinds import use_kind
from tests.support.specializations import recording_versions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(IS_CUDA, reason="versions are those of Triton's interpreter"),
]

FLAGS = {
    "dtype": "bfloat16",  # with tiles of several sizes, as GPUs have
    "block_size": 16,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 200,
    "async_scheduling": True,
}
# Chunks of odd and even numbers of tokens, of one block and of several, alone and together.
PROMPT_LENGTHS = (5, 17, 150, 1, 16)


def _requests():
    """Returns greedy and drawn requests, with each filter or both; some compare candidates, and
    some have rules.
    """
    return [
        engine_request(
            request_id=str(index),
            prompt_token_ids=tuple(prompt_of(length, seed=index)),
            temperature=float(index % 3 > 0),
            top_k=20 * (index % 2),
            top_p=1.0 if index % 4 else 0.9,
            seed=index,
            max_tokens=2 + index % 2,
            best_of=1 + index % 3 // 2,
            repetition_penalty=1.0 + index % 2,
            logit_bias={5: 1.0} if index == 1 else None,
            min_p=0.1 * (index % 3),
        )
        for index, length in enumerate(PROMPT_LENGTHS)
    ]


@pytest.fixture
def fresh_memory(monkeypatch):
    """Copies inputs of the device into new memory, whose addresses are aligned as a GPU's are."""

    def to_device(values, device):
        return torch.from_numpy(values).clone(memory_format=torch.contiguous_format)

    for module in (
        "draws.device_rows",
        "draws.drawing",
        "draws.rules",
        "draws.sampler",
        "forward.batch_inputs",
        "forward.upload",
        "steps.device_steps",
    ):
        monkeypatch.setattr(f"engine.runtime.{module}.to_device", to_device)


@pytest.mark.usefixtures("fresh_memory")
def test_steps_launch_only_versions_that_the_warm_up_launched(monkeypatch):
    use_kind("triton, graphs", monkeypatch)
    # On a GPU the engine times the longest step that its flags allow.
    monkeypatch.setattr(
        "engine.runtime.launch.trial_steps._TIMED_TOKENS_ON_CPU", FLAGS["max_num_batched_tokens"]
    )
    known, launched = set(), set()
    with recording_versions(known):
        core = build_core(tiny_checkpoint("qwen2_alternating"), "both", **FLAGS)
    with recording_versions(launched):
        run_all(core, _requests())
    core.close()
    assert launched
    assert sorted(map(str, launched - known)) == []
