"""Engines in their own processes: Baton's worker on the demo model, and workers that fail."""

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from baton.common.errors import ConfigurationError
from baton.common.model_files.named_models import demo_model_path
from benchmarks.peers import comparison, peer_process
from benchmarks.peers.catalogue import launch_of
from benchmarks.peers.environments import Setting
from benchmarks.peers.peer_process import Launch, PeerError, PeerProcess
from benchmarks.request import BenchRequest

WORKERS = Path(peer_process.__file__).parent / "workers"
REQUESTS = [BenchRequest(tuple(range(1, 40)), 8), BenchRequest((5, 6, 7), 3)]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    return launch_of(
        "baton",
        Setting(
            model=demo_model_path(),
            num_threads=1,
            peers_folder=tmp_path_factory.mktemp("peers"),
            max_model_len=128,
        ),
    )


@pytest.fixture(scope="module")
def peer(launch):
    with PeerProcess(launch) as peer:
        peer.wait_until_ready()
        yield peer


def script(tmp_path, source, *arguments):
    path = tmp_path / "worker.py"
    path.write_text(source)
    command = (sys.executable, str(path), *arguments)
    return Launch("odd", command, dict(os.environ), tmp_path / "logs" / "odd.log")


@pytest.mark.slow
def test_baton_returns_the_same_tokens_twice_with_ascending_times(peer):
    assert peer.description.startswith("baton ")
    run = peer.run(REQUESTS)
    for answer in run.answers:
        assert list(answer.token_times_s) == sorted(answer.token_times_s)
        assert 0 < answer.token_times_s[0] <= answer.token_times_s[-1] <= run.wall_s
    peer.reset()
    assert [a.token_ids for a in peer.run(REQUESTS).answers] == [a.token_ids for a in run.answers]
    assert peer.peak_memory_bytes > 50 << 20


@pytest.mark.slow
def test_a_paused_engine_is_stopped_and_answers_once_it_is_resumed(peer):
    peer.pause()
    process = psutil.Process(peer._process.pid)
    deadline = time.monotonic() + 60
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
    peer.resume()
    assert len(peer.run(REQUESTS[:1]).answers) == 1


@pytest.mark.slow
def test_close_ends_even_a_paused_process(launch):
    peer = PeerProcess(launch)
    peer.wait_until_ready()
    peer.pause()
    peer.close()
    peer.close()
    assert peer._process.returncode == 0


def test_an_engine_that_cannot_load_reports_why(launch):
    command = (*launch.command[:2], "/no/such/model", *launch.command[3:])
    odd = Launch("baton", command, launch.environment, launch.log)
    with PeerProcess(odd) as peer, pytest.raises(PeerError, match=r"baton failed: .*no/such/model"):
        peer.wait_until_ready()


def test_a_worker_that_ends_without_an_answer_is_reported_with_its_log(tmp_path):
    launch = script(tmp_path, "import sys; sys.exit('no memory')")
    with PeerProcess(launch) as peer, pytest.raises(PeerError, match=r"ended unasked; .*odd\.log"):
        peer.wait_until_ready()
    assert "no memory" in launch.log.read_text()


def test_a_peer_that_cannot_load_the_model_is_not_measured(tmp_path, monkeypatch):
    launch = script(tmp_path, "import sys; sys.exit('no such model')")
    monkeypatch.setattr(comparison, "launch_of", lambda name, setting: replace(launch, engine=name))
    setting = Setting(demo_model_path(), 1, tmp_path, 128)
    run = partial(
        comparison.compare, case_names=["batch-1"], setting=setting, repeats=1, vocab_size=64
    )
    lines: list[str] = []
    with pytest.raises(ConfigurationError, match=r"vllm ended unasked.*odd\.log"):
        run(["vllm"], write_line=lines.append, before_round=lambda: None)
    assert any(line.startswith("not measured: vllm") for line in lines)
    with pytest.raises(PeerError, match="baton ended unasked"):
        run(["vllm", "baton"], write_line=lines.append, before_round=lambda: None)


def test_a_worker_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_process, "_ANSWER_TIMEOUT_S", 0.2)
    launch = script(tmp_path, "import threading; threading.Event().wait()")
    with PeerProcess(launch) as peer, pytest.raises(PeerError, match="ended unasked"):
        peer.wait_until_ready()


def test_close_ends_an_engine_whose_threads_continue(tmp_path):
    source = f"""
import sys, threading
sys.path.insert(0, {str(WORKERS)!r})
from worker_loop import work

class Engine:
    name = "busy 1"

def load(args):
    threading.Thread(target=threading.Event().wait).start()
    return Engine()

work("", load)
"""
    launch = script(tmp_path, source, "/model", "--num-threads", "1")
    with PeerProcess(launch) as peer:
        peer.wait_until_ready()
    assert peer._process.returncode == 0
