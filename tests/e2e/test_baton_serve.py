"""`baton up` as a user runs it: three processes, a completion, killed workers, shutdown."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton import Client, SamplingParams
from baton.cli import main
from baton.errors import UnavailableError
from baton.health import wait_until_serving
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint

BATON = Path(sys.executable).with_name("baton")
START_TIMEOUT_S = 90
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = prompt_of(40)


class Up:
    """A running `baton up`.

    Attributes:
        router: the router's address.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.router = ""
        self.seen: list[str] = []

    async def read_until(self, text: str) -> str:
        async with asyncio.timeout(START_TIMEOUT_S):
            while line := (await self.process.stdout.readline()).decode():
                self.seen.append(line)
                if text in line:
                    return line
        pytest.fail(f"baton up ended without {text!r}: {''.join(self.seen)}")

    async def read_to_end(self) -> str:
        async with asyncio.timeout(START_TIMEOUT_S):
            return "".join(self.seen) + (await self.process.stdout.read()).decode()

    def children(self) -> dict[str, psutil.Process]:
        """Returns the child processes by their module."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return {child.cmdline()[2]: child for child in children}


@contextlib.asynccontextmanager
async def running_up(*arguments: str, output: int = asyncio.subprocess.PIPE):
    process = await asyncio.create_subprocess_exec(
        BATON,
        "up",
        *("--port", "0", "--num-gpu-blocks-override", "64", "--max-model-len", "512"),
        *arguments,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    up = Up(process)
    try:
        yield up
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        for folder in run_folders(process.pid):  # a killed process leaves them behind
            shutil.rmtree(folder)


def run_folders(pid: int) -> list[Path]:
    """Folders of a `baton up`: its store, and its workers' turns."""
    return list(Path("/dev/shm").glob(f"baton-up-{pid}-*"))


async def wait_until_ready(up: Up) -> None:
    up.router = (await up.read_until("router     ")).split()[-1]
    await up.read_until("Ctrl-C")


def assert_all_end(processes: list[psutil.Process]) -> None:
    # Without an init process orphans stay zombies, which hold no resources.
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


async def generate_when_back(router: str) -> list[int]:
    """Retries until the cluster serves again; returns the tokens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with Client(router) as client:
        while True:
            try:
                result = await asyncio.to_thread(client.generate, PROMPT, GREEDY, timeout_s=30)
                return list(result.token_ids)
            except UnavailableError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)


async def test_a_cluster_serves_restarts_a_killed_worker_and_shuts_down():
    path = tiny_checkpoint("llama")
    expected = reference_greedy(path, PROMPT, 8)
    async with running_up("--model", str(path), "--dtype", "float32") as up:
        await wait_until_ready(up)
        children = up.children()
        assert set(children) == {"router", "prefill_service", "decode_service"}
        with Client(up.router) as client:
            result = await asyncio.to_thread(client.generate, PROMPT, GREEDY, timeout_s=60)
        assert list(result.token_ids) == expected
        assert result.timings.prefill_ms > 0
        assert len(run_folders(up.process.pid)) == 2

        children["decode_service"].send_signal(signal.SIGKILL)
        await up.read_until("decode-0 | starting again")
        assert await generate_when_back(up.router) == expected

        children = up.children()
        up.process.send_signal(signal.SIGINT)
        output = await up.read_to_end()
        assert await up.process.wait() == 0, output
        assert len(children) == 3
        assert_all_end(list(children.values()))
        assert run_folders(up.process.pid) == []


async def test_the_demo_prints_a_completion_and_a_working_client_command():
    async with running_up("--demo") as up:
        await wait_until_ready(up)
        text = "".join(up.seen)
        assert re.search(r"\[\w+; tokens: \d+ prompt, \d+ cached, \d+ generated; ms: ", text)
        command = next(line for line in text.splitlines() if " generate " in line)
        client = await asyncio.create_subprocess_shell(
            command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        completion, figures = await client.communicate()
        assert client.returncode == 0, figures
        assert completion.strip()

        folder = turns_folder_of_workers(up)
        assert folder in run_folders(up.process.pid)
        assert {file.name for file in folder.iterdir()} == {"next", "turn"}
        up.process.send_signal(signal.SIGINT)
        output = await up.read_to_end()
        assert await up.process.wait() == 0, output
        assert run_folders(up.process.pid) == []


def turns_folder_of_workers(up: Up) -> Path:
    children = up.children()
    flags = [children[tier].cmdline() for tier in ("prefill_service", "decode_service")]
    (folder,) = {flag[flag.index("--turns-folder") + 1] for flag in flags}
    return Path(folder)


@pytest.mark.slow
async def test_a_cluster_serves_while_its_output_is_not_read(unread_pipe):
    path = tiny_checkpoint("llama")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--model", str(path), "--dtype", "float32", "--prefill", "0", "--log-level", "info")
    async with running_up(*flags, "--port", str(port), output=unread_pipe) as up:
        address = f"127.0.0.1:{port}"
        await wait_until_serving(address, START_TIMEOUT_S)
        expected = reference_greedy(path, PROMPT, 8)
        up.children()["decode_service"].send_signal(signal.SIGKILL)
        assert await generate_when_back(address) == expected
        children = list(up.children().values())
        up.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(up.process.wait(), START_TIMEOUT_S) == 0
        assert_all_end(children)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_a_killed_cluster_leaves_no_orphan():
    async with running_up("--model", str(tiny_checkpoint("llama"))) as up:
        await wait_until_ready(up)
        children = list(up.children().values())
        assert len(children) == 3
        up.process.kill()
        assert_all_end(children)


def test_a_broken_checkpoint_ends_the_start(tmp_path, capfd):
    (tmp_path / "config.json").write_text("{}")
    assert main(["up", "--model", str(tmp_path), "--port", "0"]) == 2
    assert "could not start; its last log lines have the reason" in capfd.readouterr().err


def test_a_bad_flag_ends_the_start(capsys):
    assert main(["up", "--block-size", "0"]) == 2
    assert "--block-size is 0" in capsys.readouterr().err
