"""`baton bench kernels` on a tiny model, and with wrong kernels."""

import json

import pytest
import torch

import kernels
from baton.cli import main
from benchmarks import ceilings
from benchmarks.ceilings import kernel_threads, torch_threads
from benchmarks.kernels import timing
from benchmarks.kernels.measure import PRIMITIVES
from benchmarks.models import RANDOM_MODELS
from kernels import reference

TINY = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(ceilings, "_SIZES", {"cpu": ceilings._Sizes(1 << 20, 64)})
    monkeypatch.setattr(ceilings, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_MIN_BATCHES", 1)
    monkeypatch.setattr(timing, "_MAX_COPIES", 3)
    monkeypatch.setattr(timing, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setitem(RANDOM_MODELS, "tiny", ("llama", TINY))
    monkeypatch.setitem(RANDOM_MODELS, "tied", ("llama", TINY | {"tie_word_embeddings": True}))


def bench(path, *flags):
    command = ["bench", "kernels", "--num-threads", "1", "--json", str(path), *flags]
    status = main(command)
    return status, json.loads(path.read_text())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_primitives_are_right_and_timed(dtype, tmp_path, capsys):
    status, report = bench(tmp_path / "report.json", "--model", "tiny", "--dtype", dtype)
    assert status == 0, capsys.readouterr().out
    outcomes = report["outcomes"]
    assert {outcome["primitive"] for outcome in outcomes} == set(PRIMITIVES)
    for outcome in outcomes:
        assert outcome["difference"] is None
        assert min(outcome[name] for name in ("kernel_s", "reference_s", "limit_s")) > 0
    text = capsys.readouterr().out
    assert f"kernels: {report['kernels']}: " in text
    assert "ours / limit" in text


def test_only_the_chosen_primitives_are_measured(tmp_path, capsys):
    chosen = ("--primitive", "embed", "--primitive", "row_maxima")
    _, report = bench(tmp_path / "report.json", "--model", "tied", *chosen)
    primitives = [outcome["primitive"] for outcome in report["outcomes"]]
    assert primitives == ["embed"] * 3 + ["row_maxima"] * 3
    assert "panels of the head" in capsys.readouterr().out


def test_wrong_kernels_get_no_figures(tmp_path, capsys, monkeypatch):
    def wrong(hidden, weight, eps):
        return reference.rms_norm(hidden, weight, eps) * 1.5

    monkeypatch.setattr(kernels, "rms_norm", wrong)
    chosen = ("--primitive", "rms_norm")
    status, report = bench(tmp_path / "report.json", "--model", "tiny", *chosen)
    assert status == 1
    assert all(outcome["kernel_s"] is None for outcome in report["outcomes"])
    assert "Wrong results, not measured" in capsys.readouterr().out


def test_bad_threads_are_refused(capsys):
    assert main(["bench", "kernels", "--num-threads", "0"]) == 2
    assert "--num-threads is 0" in capsys.readouterr().err


def test_numbers_of_threads_are_restored():
    def numbers():
        return kernels.num_threads(), torch.get_num_threads()

    with torch_threads(torch.get_num_threads()):  # restores what the next line sets
        kernels.set_num_threads(2)
        before = numbers()
        with kernel_threads(3):
            assert kernels.num_threads() == 3
        assert numbers() == before
        with torch_threads(3):
            assert torch.get_num_threads() == 3
        assert numbers() == before
