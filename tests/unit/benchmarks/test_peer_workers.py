"""Workers of other engines: their common loop, messages and launch commands."""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from baton.common.errors import ConfigurationError
from benchmarks import machine
from benchmarks.peers import served_files
from benchmarks.peers.cases import PeerCase
from benchmarks.peers.catalogue import ENGINES, REFERENCE, launch_of
from benchmarks.peers.comparison import find_installed, take_turns
from benchmarks.peers.environments import Setting
from benchmarks.peers.peer_process import (
    PeerAnswer,
    PeerError,
    PeerRun,
    format_run,
    parse_answer,
    parse_run,
    peak_memory_bytes,
)
from benchmarks.peers.workers.worker_loop import Request, Result, run_stepped, serve
from benchmarks.request import BenchRequest
from kernels.library.variants import variants_for

REQUESTS = [BenchRequest((1, 2), 2), BenchRequest((3,), 1)]


class OneTokenPerSecond:
    """An engine whose step takes a second and gives each running request a token."""

    def __init__(self):
        self.now = 100.0
        self._left = {}

    def clock(self):
        return self.now

    def add(self, index, request):
        self._left[index] = request.num_output_tokens

    def step(self):
        self.now += 1
        outputs = []
        for index in list(self._left):
            self._left[index] -= 1
            outputs.append((index, (index,), self._left[index] == 0))
            if self._left[index] == 0:
                del self._left[index]
        return outputs


def test_run_stepped_records_token_times():
    engine = OneTokenPerSecond()
    results = run_stepped(engine, [Request([1], 2), Request([1], 3)], engine.clock)
    assert results == [Result([0, 0], [1.0, 2.0]), Result([1, 1, 1], [1.0, 2.0, 3.0])]


class CountingEngine:
    name = "counting 1"

    def __init__(self):
        self.num_resets = 0

    def run(self, requests):
        return [
            Result(list(range(r.num_output_tokens)), [0.5] * r.num_output_tokens) for r in requests
        ]

    def reset(self):
        self.num_resets += 1


def test_a_worker_answers_each_line_until_the_quit_command():
    engine, answers = CountingEngine(), io.StringIO()
    commands = [format_run(REQUESTS), {"command": "reset"}, {"command": "quit"}, {"command": "?"}]
    serve(engine, [json.dumps(command) for command in commands], answers)
    ready, ran, reset = (json.loads(line) for line in answers.getvalue().splitlines())
    assert ready == {"ready": {"engine": "counting 1"}}
    run = parse_run("counting", ran, REQUESTS)
    assert run.answers == (PeerAnswer((0, 1), (0.5, 0.5)), PeerAnswer((0,), (0.5,)))
    assert reset == {}
    assert engine.num_resets == 1


def test_a_worker_writes_logits_if_its_engine_can(tmp_path):
    class LogitsEngine(CountingEngine):
        def write_logits(self, token_ids, file):
            Path(file).write_text(str(token_ids))

    file = tmp_path / "logits"
    command = json.dumps({"command": "logits", "token_ids": [1, 2], "file": str(file)})
    serve(LogitsEngine(), [command], io.StringIO())
    assert file.read_text() == "[1, 2]"
    with pytest.raises(ValueError, match="unknown command 'logits'"):
        serve(CountingEngine(), [command], io.StringIO())


def test_a_worker_refuses_an_unknown_command():
    with pytest.raises(ValueError, match="unknown command 'stop'"):
        serve(CountingEngine(), ['{"command": "stop"}'], io.StringIO())


@pytest.mark.parametrize("line", ["", "loading ...", "[1]", "3"])
def test_an_answer_that_is_no_json_object_is_refused(line):
    with pytest.raises(PeerError, match="no JSON object"):
        parse_answer("vllm", line)


def test_the_error_of_an_engine_is_reported():
    with pytest.raises(PeerError, match="vllm failed: out of memory"):
        parse_answer("vllm", '{"error": "out of memory"}')


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([([1, 2], [0.1, 0.2])], "answered 1 of 2"),
        ([([1, 2], [0.1, 0.2]), ([], [])], "gave request 1 0 tokens"),
        ([([1, 2], [0.1, 0.2]), ([1, 2], [0.1, 0.2])], "gave request 1 2 tokens"),
        ([([1, 2], [0.1]), ([1], [0.1])], "gave request 0 2 tokens at 1 times"),
    ],
)
def test_a_run_that_lacks_tokens_is_refused(results, message):
    answer = {
        "wall_s": 1.0,
        "requests": [{"token_ids": ids, "token_times_s": times} for ids, times in results],
    }
    with pytest.raises(PeerError, match=message):
        parse_run("vllm", answer, REQUESTS)


class FakePeer:
    """Records its calls; it must not run while it is paused."""

    def __init__(self, name, log):
        self._name, self._log, self._is_paused = name, log, True

    def run(self, requests):
        assert not self._is_paused
        self._log.append((self._name, tuple(requests[0].prompt_token_ids)))
        return PeerRun(1.0, ())

    def reset(self):
        assert not self._is_paused
        self._log.append((self._name, "reset"))

    def pause(self):
        self._is_paused = True

    def resume(self):
        self._is_paused = False


def test_engines_take_turns_from_empty_caches_and_the_first_round_does_not_count():
    log = []
    peers = {name: FakePeer(name, log) for name in ("a", "b")}
    cases = [PeerCase("x", [BenchRequest((1,), 1)], ()), PeerCase("y", [BenchRequest((2,), 1)], ())]
    lines = []
    runs = take_turns(
        peers,
        cases,
        1 << 20,
        repeats=2,
        write_line=lines.append,
        before_round=lambda: log.append("round"),
    )
    assert {name: {case: len(r) for case, r in own.items()} for name, own in runs.items()} == {
        "a": {"x": 2, "y": 2},
        "b": {"x": 2, "y": 2},
    }
    assert len(lines) == 12
    assert [index for index, entry in enumerate(log) if entry == "round"] == [8, 17]
    round_0, round_1, round_2 = log[:8], log[9:17], log[18:]
    assert round_0 == [
        *[("a", "reset"), ("a", (1,)), ("b", "reset"), ("b", (1,))],
        *[("a", "reset"), ("a", (2,)), ("b", "reset"), ("b", (2,))],
    ]
    assert [name for name, _ in round_1] == ["b", "b", "a", "a"] * 2
    assert [name for name, _ in round_2] == ["a", "a", "b", "b"] * 2
    # Within a round every engine gets the same tokens; each round has new ones.
    assert [prompt for _, prompt in round_1[1::2]] == [(7920,), (7920,), (7921,), (7921,)]
    assert len({prompt for _, prompt in round_0 + round_1 + round_2} - {"reset"}) == 6


def test_the_round_that_does_not_count_has_a_quarter_of_the_requests():
    sizes = []

    class SizedPeer(FakePeer):
        def run(self, requests):
            sizes.append(len(requests))
            return super().run(requests)

    case = PeerCase("x", [BenchRequest((1,), 1)] * 5, ())
    take_turns({"a": SizedPeer("a", [])}, [case], 9, 1, lambda line: None, lambda: None)
    assert sizes == [2, 5]


def test_an_engine_that_fails_is_paused():
    class FailingPeer(FakePeer):
        def run(self, requests):
            raise PeerError("failed")

    peer, case = FailingPeer("a", []), PeerCase("x", [BenchRequest((1,), 1)], ())
    with pytest.raises(PeerError):
        take_turns({"a": peer}, [case], 9, 1, lambda line: None, lambda: None)
    assert peer._is_paused


def test_peak_memory_includes_all_descendants(tmp_path):
    children = {1: "2 3", 2: "4", 3: "", 4: ""}
    for pid, its_children in children.items():
        task = tmp_path / str(pid) / "task" / str(pid)
        task.mkdir(parents=True)
        (task / "children").write_text(its_children)
        (tmp_path / str(pid) / "status").write_text(
            f"Name:\tx\nVmPeak:\t 999 kB\nVmHWM:\t {10**pid} kB\n"
        )
    (tmp_path / "3" / "status").write_text("Name:\tx\nState:\tZ (zombie)\n")
    assert peak_memory_bytes(1, tmp_path) == 1024 * (10 + 100 + 10_000)


def setting_of(folder):
    return Setting(model=Path("/model"), num_threads=3, peers_folder=folder, max_model_len=64)


def test_an_unknown_engine_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="--engines has 'llm'; known are baton, vllm"):
        launch_of("llm", setting_of(tmp_path))


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"baton", "baton-fast"}))
def test_a_missing_environment_is_reported_with_the_command_that_makes_it(engine, tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"make_env\.sh (vllm|openvino|transformers|llamacpp) "
    ):
        launch_of(engine, setting_of(tmp_path))


def test_peers_run_their_own_interpreter_without_the_environment_of_baton(tmp_path, monkeypatch):
    make_environments(tmp_path, "transformers")
    monkeypatch.setenv("PYTHONPATH", "/baton")
    launch = launch_of("transformers", setting_of(tmp_path))
    assert launch.command[0] == str(tmp_path / "transformers" / "bin" / "python")
    assert Path(launch.command[1]).is_file()
    assert launch.command[2:] == (
        *("/model", "--num-threads", "3", "--dtype", "bfloat16", "--max-model-len", "64"),
        *("--device", "cpu"),
    )
    assert launch.environment["OMP_NUM_THREADS"] == "3"
    assert "PYTHONPATH" not in launch.environment
    assert "PYTHONPATH" in launch_of("baton", setting_of(tmp_path)).environment


def test_engines_that_are_not_installed_are_left_out_and_named(tmp_path):
    launches, missing = find_installed(["baton", "openvino", REFERENCE], setting_of(tmp_path))
    assert list(launches) == ["baton"]
    assert list(missing) == ["openvino", REFERENCE]
    assert "make_env.sh openvino" in missing["openvino"]


def make_environments(folder, *names):
    for name in names:
        python = folder / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()


def hold_to_avx2(monkeypatch):
    best = variants_for("x86_64")[0]
    monkeypatch.setattr(machine, "variants_for", lambda: variants_for("x86_64"))
    monkeypatch.setattr(machine, "cpu_features", lambda: best.cpu_features)
    assert "forced_on" not in machine.name_machine()
    monkeypatch.setenv("BATON_CPU_KERNELS", "avx2")
    names = machine.name_machine()
    assert (names["instruction_set"], names["forced_on"]) == ("avx2", best.name)


def test_engines_are_held_to_the_instruction_set_of_batons_kernels(tmp_path, monkeypatch):
    hold_to_avx2(monkeypatch)
    make_environments(tmp_path, "vllm", "transformers")
    environment = launch_of(REFERENCE, setting_of(tmp_path)).environment
    assert environment["OV_CPU_MAX_ISA"] == environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    launches, missing = find_installed(["baton", "vllm", "transformers"], setting_of(tmp_path))
    assert list(launches) == ["baton"]
    assert missing["vllm"] == "vllm cannot be held to avx2"
    monkeypatch.setenv("BATON_CPU_KERNELS", "generic")
    with pytest.raises(ConfigurationError, match="can be held to avx2, avx2_vnni only"):
        launch_of("baton", setting_of(tmp_path))


def test_engines_that_read_no_gguf_files_are_left_out_of_their_comparison(tmp_path, monkeypatch):
    make_environments(tmp_path, "llamacpp", "llamacpp-avx2", "vllm")
    setting = replace(setting_of(tmp_path), model=tmp_path / "model.gguf")
    launches, missing = find_installed(["baton", "llamacpp", "vllm", REFERENCE], setting)
    assert list(launches) == ["baton", "llamacpp"]
    assert missing["vllm"] == "vllm is not measured on GGUF files"
    assert {launch.command[2] for launch in launches.values()} == {str(setting.model)}
    hold_to_avx2(monkeypatch)
    held = launch_of("llamacpp", setting).command[0]
    assert held == str(tmp_path / "llamacpp-avx2" / "bin" / "python")


def test_quantized_forms_are_made_once_and_served_by_baton_and_llama_cpp(tmp_path, monkeypatch):
    make_environments(tmp_path, "llamacpp")
    setting = replace(setting_of(tmp_path), model=tmp_path / "model.gguf")
    setting.model.touch()
    commands = []

    def run(command, **_):
        commands.append(command)
        Path(command[3]).touch()
        return CompletedProcess(command, 0)

    monkeypatch.setattr(served_files.subprocess, "run", run)
    models = [launch_of(f"{name}-q4_0", setting).command[2] for name in ("baton", "llamacpp")]
    assert models[0] == models[1] == launch_of("baton-q4_0-fast", setting).command[2]
    assert launch_of("baton-q4_0-fast", setting).command[-2:] == ("--quantized-compute", "fast")
    assert Path(models[0]).parent == tmp_path / "models"
    ((_, script, source, _, form),) = commands
    assert (Path(script).name, source, form) == ("llamacpp_quantize.py", str(setting.model), "q4_0")
    setting.model.write_text("another")
    os.utime(setting.model, (1, 1))
    assert launch_of("baton-q4_0", setting).command[2] != models[0]


def test_on_a_gpu_peers_without_an_environment_run_in_batons(tmp_path):
    setting = replace(setting_of(tmp_path), device="cuda")
    launch = launch_of("transformers-cb", setting)
    assert launch.command[0] == sys.executable
    assert launch.command[-2:] == ("--device", "cuda")
    with pytest.raises(ConfigurationError, match="--engines has 'vllm', which is not measured on"):
        launch_of("vllm", setting)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_a_worker(engine):
    folder = Path(launch_of.__code__.co_filename).parent / "workers"
    assert (folder / f"{ENGINES[engine].worker}.py").is_file()
