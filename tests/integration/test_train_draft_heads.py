"""The script that trains heads writes checkpoints that engines draft with."""

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from engine.speculation import drafts
from tests.support.draft_heads import METHODS
from tests.support.real_engines import build_core, run_all, tokens_of
from tests.support.requests import engine_request

_ROOT = Path(__file__).parents[2]
_MODEL = _ROOT / "baton" / "demo_model"

# Without AVX-512 bfloat16 takes three times as long.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """Restores what the script sets for its process."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("method", METHODS)
def test_trained_heads_are_right_where_untrained_ones_are_not(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few seconds of training on few texts, so few draft tokens are right."""
    monkeypatch.syspath_prepend(str(_ROOT / "scripts"))
    script = importlib.import_module("train_draft_heads")
    monkeypatch.setattr(script, "_NUM_OWN_TEXTS", 32)
    monkeypatch.setattr(script, "_TEXTS_PER_BATCH", 16)
    monkeypatch.setattr(script, "_CONTINUATION_LENGTH", 66)
    folder = tmp_path / "heads"
    flags = ["--method", method, "--steps", "60", "--output", str(folder)]
    monkeypatch.setattr(sys, "argv", ["train_draft_heads.py", *flags])
    script.main()
    assert "## Accepted draft tokens" in (folder / "MODEL_CARD.md").read_text()

    monkeypatch.setattr(drafts.Drafts, "_plan", lambda self, _: drafts._Plan(self._most, math.inf))
    config = {"method": method, "model": str(folder), "num_speculative_tokens": 2}
    sizes = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}
    requests = [
        engine_request(str(index), (0, *range(100 + index, 120 + index)), max_tokens=60)
        for index in range(6)
    ]
    with closing(build_core(_MODEL, "both", **sizes)) as core:
        plain = {key: tokens_of(each) for key, each in run_all(core, requests).items()}
    with closing(build_core(_MODEL, "both", speculative_config=config, **sizes)) as core:
        outputs = run_all(core, requests)
        accepted = core.metrics.snapshot().values["baton_engine_draft_tokens", "accepted"]
    assert {key: tokens_of(each) for key, each in outputs.items()} == plain
    assert accepted > 20
