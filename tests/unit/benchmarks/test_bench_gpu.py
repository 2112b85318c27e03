"""Parts of the benchmarks of a GPU that need none: sizes, floors, messages, launches ahead."""

import json

import pytest
import torch

from benchmarks import machine
from benchmarks.cli import _COMMANDS
from benchmarks.kernels import timing
from benchmarks.kernels.case import SIZES, ByteSpan, DecoderShape
from benchmarks.kernels.measure import PRIMITIVES, make_cases
from benchmarks.model_cost import Ceilings, ModelShape, decode_floor_s
from benchmarks.model_shape import read_shape
from benchmarks.models import RANDOM_MODELS, offline_config, resolve_model, write_random_config
from benchmarks.offline.step_floors import operations_floor_s
from benchmarks.planned import PartReport, PlannedPart
from engine.config import EngineConfig
from scripts import gpu_first
from scripts.gpu_first import CALLS, SECONDS
from tests.support.bench_flags import parse_bench

_BENCHES = [part for parts in CALLS.values() for part in parts if part.module == "benchmarks"]
_CEILINGS = Ceilings(read_bytes_per_s=1e12, operations_per_s=1e14)


@pytest.mark.parametrize(
    ("name", "num_weights", "kv_bytes"),
    [("llama-3.1-8b", 8.03e9, 131_072), ("qwen3-0.6b", 0.596e9, 114_688)],
)
def test_dense_models_have_the_size_in_their_name(name, num_weights, kv_bytes, tmp_path):
    folder = write_random_config(name, tmp_path)
    config = RANDOM_MODELS[name][1]
    shape, dtype = read_shape(EngineConfig(model=str(folder), load_format="dummy"))
    tables = 1 if config["tie_word_embeddings"] else 2
    total = shape.num_body_weights + tables * shape.num_head_weights
    assert total == pytest.approx(num_weights, rel=0.002)
    assert dtype == "bfloat16"
    decoder = DecoderShape.of_config(config)
    assert 2 * 2 * decoder.num_layers * decoder.num_kv_features == kv_bytes
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("name", "num_weights", "num_attention_features"),
    [("qwen3-moe-0.5b", 60e6, 12 * 12 * 64), ("qwen3.5-120m", 116e6, 3 * 12 * 64)],
)
def test_sizes_are_those_that_a_token_uses(name, num_weights, num_attention_features, tmp_path):
    """Four of a mixture's experts, and attention in one layer of four."""
    folder = write_random_config(name, tmp_path)
    shape, _ = read_shape(EngineConfig(model=str(folder), load_format="dummy"))
    tables = 1 if RANDOM_MODELS[name][1]["tie_word_embeddings"] else 2
    total = shape.num_body_weights + tables * shape.num_head_weights
    assert total == pytest.approx(num_weights, rel=0.02)
    assert shape.num_attention_features == num_attention_features


@pytest.mark.parametrize("part", [part for part in CALLS["first"] if part.name == "steps"])
def test_the_engine_has_room_for_every_step_of_the_plan(part, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.models._MODELS_FOLDER", tmp_path)
    args = parse_bench(part.arguments)
    config = offline_config(args)
    assert config.max_model_len > max(args.input_len) + 2 * args.num_steps + 8
    assert config.max_num_seqs >= max(args.batch_size)
    assert config.max_num_batched_tokens >= max(args.input_len)
    assert config.device == "cuda"


@pytest.mark.parametrize("part", _BENCHES)
def test_every_part_is_a_benchmark_with_flags_that_it_knows(part):
    args = parse_bench(part.arguments)
    assert args.benchmark in _COMMANDS
    assert args.json is None


def test_kernels_have_cases_for_a_gpu():
    shape = DecoderShape.of_config(RANDOM_MODELS["llama-3.1-8b"][1])
    cases = make_cases(list(PRIMITIVES), shape, torch.bfloat16, torch.device("cuda"))
    assert {case.primitive for case in cases} == set(PRIMITIVES)
    assert len({(case.primitive, case.what, case.size) for case in cases}) == len(cases)
    sizes = {case.size for case in cases if case.primitive == "paged_attention"}
    assert {f"{count} x {context}" for count, context in SIZES["cuda"].decode} <= sizes
    by_library = {case.size for case in cases if case.what.endswith(", cuBLAS")}
    assert by_library == {"1 row", "8 rows", "16 rows"}


def test_the_floor_of_a_decode_step_counts_weights_and_kv():
    shape = ModelShape(900, 10, 100, 0)  # 1000 weights of two bytes
    floor_s = decode_floor_s(shape, _CEILINGS, batch_size=3, context=50, kv_bytes_per_token=20)
    assert floor_s == pytest.approx((2000 + 3 * 50 * 20) / 1e12)


def test_the_floor_of_a_large_step_is_its_operations():
    shape = ModelShape(10**9, 10, 10**8, 1000)
    floor_s = decode_floor_s(shape, _CEILINGS, batch_size=1000, context=10, kv_bytes_per_token=1)
    operations = 1000 * (2 * 1.1e9 + 4 * 1000 * 10)
    assert floor_s == pytest.approx(operations / 1e14)


def test_the_floor_of_operations_is_that_of_each_one_alone():
    """A large product takes the time of its operations, the reads of KV that of their bytes."""
    shape = DecoderShape(
        width=64,
        num_gated=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=1000,
        has_tied_head=False,
    )
    ceilings = Ceilings(read_bytes_per_s=1e9, operations_per_s=1e11)
    rows, context = 200, 500
    spans = [ByteSpan(context - 1, 1)] * rows
    matrices = [(64 + 2 * 32) * 64, 64 * 64, 2 * 128 * 64, 64 * 128]
    products_s = 3 * sum(2 * rows * size / 1e11 for size in matrices)  # 200 rows: 2 > 0.4 / byte
    attention_s = 3 * rows * context * 2 * 32 * 2 / 1e9
    head_s = 2 * rows * 64 * 1000 / 1e11
    floor_s = operations_floor_s(shape, spans, ceilings, num_drawn=rows)
    assert floor_s == pytest.approx(products_s + attention_s + head_s)


def test_all_missing_packages_are_named_in_one_line(monkeypatch):
    absent = {"triton", "xxhash", "pytest"}
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name in absent else name)
    assert machine.find_problem() == (
        "not installed: triton, xxhash; on a GPU machine: pip install 'baton-llm[gpu]'"
    )
    assert machine.find_problem("gpu,test", ["pytest"]) == (
        "not installed: triton, xxhash, pytest; on a GPU machine: pip install 'baton-llm[gpu,test]'"
    )


def test_dummy_weights_need_no_weights_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.models._MODELS_FOLDER", tmp_path)
    folder = resolve_model("llama-3.1-8b", "dummy")
    assert not list((tmp_path / folder).glob("*.safetensors"))


# Launches


class Mark:
    """An event that a device reaches when the test says so."""

    def __init__(self, reached):
        self._reached = reached

    def query(self):
        return self in self._reached


def test_launch_ahead_marks_the_start_and_end_of_each_call():
    launched = []
    marks = timing._launch_ahead(lambda: launched.append(1), 3, lambda: Mark([]))
    assert len(launched) == 3
    assert len(set(marks)) == 4


def test_a_device_that_catches_up_with_the_host_raises_an_error():
    """The device reaches the third call while the host still launches it."""
    marks, reached, launched = [], [], []

    def mark():
        marks.append(Mark(reached))
        return marks[-1]

    def launch():
        launched.append(1)
        if len(launched) == 3:
            reached.extend(marks)

    with pytest.raises(RuntimeError, match="the device came to call 3 of 5 before all of it was"):
        timing._launch_ahead(launch, 5, mark)


# The plan


def test_the_two_commands_of_a_quarter_of_an_hour_fit_into_it():
    starts_s = 2 * 60
    assert SECONDS["first"] + SECONDS["second"] + starts_s <= 15 * 60
    assert max(SECONDS["first"], SECONDS["second"]) <= 10 * 60
    for call in ("first", "second"):
        assert sum(part.weight for part in CALLS[call]) == pytest.approx(SECONDS[call])


def test_few_files_come_back_from_a_command():
    """A machine that is lent may return eight."""
    assert all(1 + len(CALLS[call]) <= 8 for call in ("first", "second"))


def test_without_a_gpu_nothing_is_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_first, "find_problem", lambda *needed: "no CUDA device")
    assert gpu_first.main(["--out", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().out == "gpu-first: no CUDA device; nothing was run\n"
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_writes_the_parts_so_far(tmp_path, monkeypatch):
    def interrupted(parts, folder, suffix, deadline_s):
        yield PartReport(parts[0].name, 1.0, file="kernels.json")
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_first, "run_parts", interrupted)
    parts = [PlannedPart("kernels", (), 1), PlannedPart("steps", (), 1)]
    monkeypatch.setenv("BATON_COMMIT", "abc1234")
    with pytest.raises(KeyboardInterrupt):
        gpu_first.run_call("smoke", parts, tmp_path, 10.0)
    content = json.loads((tmp_path / "smoke.json").read_text())
    assert not content["finished"]
    assert content["machine"]["commit"] == "abc1234"
    assert [part["file"] for part in content["parts"]] == ["kernels.json"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--part", "lunch"], "--part is 'lunch'; it must be one of machine, collect"),
        (["--call", "second", "--part", "steps"], "it must be one of attention_sweep, kernels"),
        (["--deadline", "0"], "--deadline is 0.0; it must be > 0"),
    ],
)
def test_bad_flags_are_refused(flags, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        gpu_first.main(["--out", str(tmp_path), *flags])
    assert message in capsys.readouterr().err
