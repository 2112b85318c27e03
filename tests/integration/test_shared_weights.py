"""Processes of one machine share the weights of a model through a file."""

import threading
from pathlib import Path

import pytest
import torch

from engine.runtime.weights import loader, shared_weights
from engine.runtime.weights.loader import LoadedModel, load_model
from tests.support.checkpoints import tiny_checkpoint
from tests.support.real_engines import build_core, run_all
from tests.support.requests import engine_request


def load(folder: Path, variant: str = "llama", dtype: str = "auto") -> LoadedModel:
    path = str(tiny_checkpoint(variant))
    return load_model(path, dtype, "cpu", progress=False, weights_folder=str(folder))


def weights_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    packed = {
        name: module.weight.data
        for name, module in loaded.model.named_modules()
        if hasattr(module, "allocate")
    }
    return packed | {name: each.data for name, each in loaded.model.named_parameters()}


def check_equal(loaded: LoadedModel, other: LoadedModel) -> None:
    weights, others = weights_of(loaded), weights_of(other)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def file_in(folder: Path) -> Path:
    (file,) = (each for each in folder.glob("weights-*") if not each.suffix)
    return file


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per time that weights were read from a checkpoint."""
    copy, counted = loader._copy_weights, list[str]()

    def counting(*args: object, **options: object) -> None:
        counted.append("filled")
        copy(*args, **options)

    monkeypatch.setattr(loader, "_copy_weights", counting)
    return counted


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_only_the_first_process_reads_the_checkpoint(
    variant: str, tmp_path: Path, fills: list[str]
) -> None:
    private = load_model(str(tiny_checkpoint(variant)), "auto", "cpu", progress=False)
    loaded = [load(tmp_path, variant) for _ in range(2)]
    assert len(fills) == 2
    for each in loaded:
        check_equal(each, private)


def test_the_file_is_of_one_dtype(tmp_path: Path, fills: list[str]) -> None:
    load(tmp_path, dtype="float32")
    assert {weight.dtype for weight in weights_of(load(tmp_path, dtype="bfloat16")).values()} == {
        torch.bfloat16
    }
    assert len(fills) == 2


def test_processes_that_start_together_fill_it_once(tmp_path: Path, fills: list[str]) -> None:
    loaded: list[LoadedModel] = []
    threads = [threading.Thread(target=lambda: loaded.append(load(tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(loaded) == 3
    assert len(fills) == 1
    check_equal(loaded[0], loaded[1])
    check_equal(loaded[0], loaded[2])


def test_a_process_cannot_change_the_weights_of_another(tmp_path: Path) -> None:
    first, second = load(tmp_path), load(tmp_path)
    before = file_in(tmp_path).read_bytes()
    for weight in weights_of(first).values():
        weight.zero_()
    assert all(weight.any() for weight in weights_of(second).values())
    assert file_in(tmp_path).read_bytes() == before


@pytest.mark.parametrize("damage", ["changed", "short"])
def test_a_damaged_file_is_written_again(
    damage: str, tmp_path: Path, fills: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    private = load(tmp_path)
    content = bytearray(file_in(tmp_path).read_bytes())
    content[100] ^= 1
    damaged = content if damage == "changed" else content[:-1]
    file = file_in(tmp_path)
    file.unlink()  # the first process has mapped it
    file.write_bytes(damaged)
    check_equal(load(tmp_path), private)
    assert len(fills) == 2
    assert ("is damaged" in caplog.text) == (damage == "changed")
    load(tmp_path)
    assert len(fills) == 2


def test_without_room_the_weights_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = load(tmp_path / "..")
    monkeypatch.setattr(shared_weights, "_MAX_FREE_FRACTION", 2**60)
    folder = tmp_path / "full"
    folder.mkdir()
    check_equal(load(folder), shared)
    assert "weights are not shared" in caplog.text
    assert [file.suffix for file in folder.iterdir()] == [".lock"]


def test_a_failed_load_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError("injected by the test")

    with monkeypatch.context() as patch:
        patch.setattr(loader, "_copy_weights", fail)
        with pytest.raises(OSError, match="injected"):
            load(tmp_path)
    assert [file.suffix for file in tmp_path.iterdir()] == [".lock"]
    load(tmp_path)


def test_engines_with_shared_weights_generate_the_same_tokens(tmp_path: Path) -> None:
    tokens = []
    for folder in (None, str(tmp_path), str(tmp_path)):
        core = build_core(tiny_checkpoint("llama"), "both", weights_folder=folder)
        prompt = tuple(range(5, 30))
        request = engine_request(request_id="one", prompt_token_ids=prompt, max_tokens=8)
        (outputs,) = run_all(core, [request]).values()
        tokens.append([token for output in outputs for token in output.token_ids])
        core.close()
    assert tokens[0] == tokens[1] == tokens[2]
