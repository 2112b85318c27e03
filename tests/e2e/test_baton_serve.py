"""`baton serve` as a user runs it: three processes, both APIs, killed workers, shutdown."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest

from baton import Client, SamplingParams
from baton.cli import main
from baton.common.errors import UnavailableError
from baton.v1 import worker_pb2, worker_pb2_grpc
from rpc.probe import wait_until_serving
from tests.support.certificates import Authority, write_files
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.ports import reserved_port
from worker.processes.run_folder import SHARED_MEMORY

BATON = Path(sys.executable).with_name("baton")
START_TIMEOUT_S = 90
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = prompt_of(40)


class Served:
    """A running `baton serve`.

    Attributes:
        router: the address of the router's gRPC server.
        url: the base URL of its HTTP server.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.router = self.url = ""
        self.seen: list[str] = []

    async def read_until(self, text: str) -> str:
        async with asyncio.timeout(START_TIMEOUT_S):
            while line := (await self.process.stdout.readline()).decode():
                self.seen.append(line)
                if text in line:
                    return line
        pytest.fail(f"baton serve ended without {text!r}: {''.join(self.seen)}")

    async def read_to_end(self) -> str:
        async with asyncio.timeout(START_TIMEOUT_S):
            return "".join(self.seen) + (await self.process.stdout.read()).decode()

    def children(self) -> dict[str, psutil.Process]:
        """Returns the child processes by their module, without the workers' watchdogs."""
        children = psutil.Process(self.process.pid).children()
        return {child.cmdline()[5]: child for child in children}


@contextlib.asynccontextmanager
async def running_serve(*arguments: str, output: int = asyncio.subprocess.PIPE):
    process = await asyncio.create_subprocess_exec(
        BATON,
        "serve",
        *("--port", "0", "--grpc-port", "0"),
        *("--num-gpu-blocks-override", "64", "--max-model-len", "512"),
        *arguments,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    served = Served(process)
    try:
        yield served
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        # A killed process leaves them behind, until another cluster of this machine starts.
        for folder in run_folders(process.pid):
            shutil.rmtree(folder, ignore_errors=True)


def run_folders(pid: int) -> list[Path]:
    """Folders of a `baton serve`: its store, and its workers' turns."""
    return list(Path("/dev/shm").glob(f"baton-up-{pid}-*"))


async def wait_until_ready(served: Served) -> None:
    served.url = (await served.read_until("http       ")).split()[-1]
    served.router = (await served.read_until("grpc       ")).split()[-1]
    await served.read_until("Ctrl-C")


def assert_all_end(processes: list[psutil.Process]) -> None:
    # Without an init process orphans stay zombies, which hold no resources.
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def read_private(path: Path) -> str:
    """Returns the text of a file that only its owner may read."""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return path.read_text().strip()


async def check_that_workers_need_the_token(served: Served) -> None:
    shown = dict(line.split() for line in served.seen if re.match(r"(token|decode-0) +\S+$", line))
    token = read_private(Path(shown["token"]))
    for child in served.children().values():
        assert child.environ()["BATON_CLUSTER_TOKEN"] == token
        assert token not in " ".join(child.cmdline())
    assert token not in "".join(served.seen)
    async with grpc.aio.insecure_channel(shown["decode-0"]) as channel:
        worker, request = worker_pb2_grpc.WorkerServiceStub(channel), worker_pb2.GetInfoRequest()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await worker.GetInfo(request, timeout=30)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with_token = (("authorization", f"Bearer {token}"),)
        assert (await worker.GetInfo(request, timeout=30, metadata=with_token)).worker_id


async def generate_when_back(router: str) -> list[int]:
    """Retries until the cluster serves again; returns the tokens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with Client(router) as client:
        while True:
            try:
                # Later than the router gives up, which may be before the worker is back.
                result = await asyncio.to_thread(client.generate, PROMPT, GREEDY, timeout_s=60)
                return list(result.token_ids)
            except UnavailableError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_cluster_serves_restarts_a_killed_worker_and_shuts_down():
    path = tiny_checkpoint("llama")
    expected = reference_greedy(path, PROMPT, 8)
    async with running_serve("--model", str(path), "--dtype", "float32") as served:
        await wait_until_ready(served)
        children = served.children()
        assert set(children) == {"router", "worker.prefill", "worker.decode"}
        with Client(served.router) as client:
            result = await asyncio.to_thread(client.generate, PROMPT, GREEDY, timeout_s=60)
        assert list(result.token_ids) == expected
        assert result.timings.prefill_ms > 0
        assert len(run_folders(served.process.pid)) == 3
        await check_that_workers_need_the_token(served)
        (watch,) = (
            line.strip() for line in served.seen if f"top --address {served.router}" in line
        )
        screen = await run_in_shell(f"{watch} --once --interval 0.2")
        assert f"router {served.router}" in screen
        assert len(re.findall(r"^(?:prefill|decode) .* ready ", screen, re.MULTILINE)) == 2
        (address,) = re.findall(r"^decode +(\S+) +ready ", screen, re.MULTILINE)
        change = watch.replace("top --address", f"role {address} both --address")
        assert f"{address} takes requests of both tiers" in await run_in_shell(change)
        assert re.search(r"^both .* ready ", await run_in_shell(f"{watch} --once"), re.MULTILINE)

        served.process.send_signal(signal.SIGHUP)
        for child in children.values():
            child.send_signal(signal.SIGHUP)
        with Client(served.router) as client:
            result = await asyncio.to_thread(client.generate, PROMPT, GREEDY, timeout_s=60)
        assert list(result.token_ids) == expected
        assert served.children() == children

        children["worker.decode"].send_signal(signal.SIGKILL)
        await served.read_until("decode-0 | starting again")
        assert await generate_when_back(served.router) == expected

        children = served.children()
        served.process.send_signal(signal.SIGINT)
        output = await served.read_to_end()
        assert await served.process.wait() == 0, output
        assert len(children) == 3
        assert_all_end(list(children.values()))
        assert run_folders(served.process.pid) == []


async def test_the_demo_prints_a_completion_and_a_command_that_works_when_pasted():
    async with running_serve("--demo") as served:
        await wait_until_ready(served)
        text = "".join(served.seen)
        assert re.search(r"\[\w+; tokens: \d+ prompt, \d+ cached, \d+ generated; ms: ", text)
        command = next(line for line in text.splitlines() if " curl " in line)
        await try_curl(command)
        flags = f"--url {served.url} --max-tokens 4 --temperature 0"
        assert await run_in_shell(f"{BATON} complete 'Return a' {flags}")
        assert await run_in_shell(f"{BATON} chat Hello {flags}")

        folder = turns_folder_of_workers(served)
        assert folder in run_folders(served.process.pid)
        assert {file.name.partition("-")[0] for file in folder.iterdir()} == {
            *("next", "turn", "weights")
        }
        served.process.send_signal(signal.SIGINT)
        output = await served.read_to_end()
        assert await served.process.wait() == 0, output
        assert run_folders(served.process.pid) == []


@pytest.mark.slow
@pytest.mark.parametrize("cert_reqs", ["none", "required"])
async def test_a_router_with_tls_is_ready_and_the_printed_command_works(tmp_path, cert_reqs):
    authority = Authority()
    leaf = authority.issue("router", dns=["baton.example.com"], addresses=[])
    own = write_files(tmp_path / "router", leaf, authority.certificate)
    client = write_files(tmp_path / "client", authority.issue("client"))
    flags = ["--ssl-certfile", own.certfile, "--ssl-keyfile", own.keyfile]
    pair = ""
    if cert_reqs == "required":
        flags += ["--ssl-ca-certs", own.ca_certs, "--ssl-cert-reqs", "required"]
        pair = f" --cert {client.certfile} --key {client.keyfile}"
    else:
        flags.append("--demo")
    async with running_serve(*flags) as served:
        await wait_until_ready(served)
        assert served.url.startswith("https://")
        command = next(line for line in "".join(served.seen).splitlines() if " curl " in line)
        await try_curl(command + pair)
        if not pair:
            shared = f"--ssl-ca-certs {own.ca_certs} --ssl-server-name baton.example.com"
            assert await run_in_shell(f"{BATON} health {served.router} {shared}") == "SERVING\n"
            flags = f"--address {served.router} --max-tokens 4 --temperature 0 {shared}"
            assert await run_in_shell(f"{BATON} generate Hello {flags}")


async def try_curl(command: str) -> None:
    """Runs a command of curl, if that is installed; its answer must have a text."""
    if shutil.which("curl") is not None:
        answer = json.loads(await run_in_shell(command))
        assert answer["choices"][0]["message"]["content"].strip()


async def run_in_shell(command: str) -> str:
    """Returns what a command prints."""
    client = await asyncio.create_subprocess_shell(
        command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await client.communicate()
    assert client.returncode == 0, errors
    return output.decode()


def turns_folder_of_workers(served: Served) -> Path:
    children = served.children()
    flags = [children[tier].cmdline() for tier in ("worker.prefill", "worker.decode")]
    (folder,) = {flag[flag.index("--turns-folder") + 1] for flag in flags}
    return Path(folder)


@pytest.mark.slow
async def test_a_cluster_serves_while_its_output_is_not_read(unread_pipe):
    path = tiny_checkpoint("llama")
    port = reserved_port()
    flags = ("--model", str(path), "--dtype", "float32", "--prefill", "0", "--log-level", "info")
    grpc_only = ("--port", "none", "--grpc-port", str(port))
    async with running_serve(*flags, *grpc_only, output=unread_pipe) as served:
        address = f"127.0.0.1:{port}"
        await wait_until_serving(address, START_TIMEOUT_S)
        expected = reference_greedy(path, PROMPT, 8)
        served.children()["worker.decode"].send_signal(signal.SIGKILL)
        assert await generate_when_back(address) == expected
        children = list(served.children().values())
        served.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(served.process.wait(), START_TIMEOUT_S) == 0
        assert_all_end(children)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_a_killed_cluster_leaves_no_orphan():
    async with running_serve("--model", str(tiny_checkpoint("llama"))) as served:
        await wait_until_ready(served)
        children = list(served.children().values())
        assert len(children) == 3
        served.process.kill()
        assert_all_end(children)


def test_a_broken_checkpoint_ends_the_start(tmp_path, capfd):
    (tmp_path / "config.json").write_text("{}")
    assert main(["up", "--model", str(tmp_path), "--port", "0", "--grpc-port", "none"]) == 2
    assert "could not start; its last log lines have the reason" in capfd.readouterr().err


def test_a_bad_flag_ends_the_start(capsys):
    assert main(["serve", "--block-size", "0"]) == 2
    assert "--block-size is 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_batch_runs_on_a_cluster_of_its_own(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    # Drawn tokens could be special ones, which have no text.
    greedy = {"model": "tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    bodies = [{**greedy, "prompt": text} for text in ("a", "b", "c")]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    cluster = ("--model", str(tiny_checkpoint("llama")), "--served-model-name", "tiny")
    pool = ("--num-gpu-blocks-override", "64", "--max-model-len", "128", "--num-threads", "1")
    tiers = ("--prefill-workers", "0")
    before = set(psutil.Process().children(recursive=True))
    assert main(["run-batch", "-i", str(source), "-o", str(target), *cluster, *pool, *tiers]) == 0
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert {result["custom_id"] for result in results} == {"0", "1", "2"}
    assert all(result["response"]["body"]["choices"][0]["text"] for result in results)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
def test_a_conversation_starts_and_stops_a_cluster():
    flags = ("serve", "--chat", "--port", "0", "--grpc-port", "none", "--prefill-workers", "0")
    limits = ("--num-gpu-blocks-override", "64", "--max-model-len", "256")
    chat = subprocess.run(
        [BATON, *flags, *limits],
        input="Hello\n/reset\n/exit\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=START_TIMEOUT_S,
    )
    assert chat.returncode == 0, chat.stderr
    assert re.search(
        r"Talking to demo.*\[\w+; tokens: .*A new conversation", chat.stderr, re.DOTALL
    )
    assert chat.stdout.replace("> ", "").strip()


@pytest.mark.slow
def test_a_signal_ends_a_conversation_and_its_cluster_in_order():
    flags = ("serve", "--chat", "--port", "0", "--grpc-port", "none", "--prefill-workers", "0")
    limits = ("--num-gpu-blocks-override", "64", "--max-model-len", "256")
    chat = subprocess.Popen(
        [BATON, *flags, *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with chat:
        assert any("Talking to demo" in line for line in chat.stderr)
        children = psutil.Process(chat.pid).children(recursive=True)
        assert children
        chat.send_signal(signal.SIGHUP)
        assert chat.wait(START_TIMEOUT_S) == 128 + signal.SIGHUP
    assert not psutil.wait_procs(children, timeout=0)[1]
    assert not list(SHARED_MEMORY.glob(f"baton-up-{chat.pid}-*"))


@pytest.mark.slow
def test_a_signal_ends_a_batch_and_its_cluster_in_order(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "demo", "prompt": "Return", "max_tokens": 200, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps(line | {"custom_id": str(number)}) for number in range(500)]
    source.write_text("\n".join(lines))
    limits = ("--num-gpu-blocks-override", "64", "--max-model-len", "256", "--concurrency", "1")
    command = ("run-batch", "-i", source, "-o", target, "--model", "demo", "--prefill-workers", "0")
    with subprocess.Popen([BATON, *command, *limits], stderr=subprocess.DEVNULL) as batch:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (target.exists() and target.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(batch.pid).children(recursive=True)
        assert children
        batch.send_signal(signal.SIGTERM)
        assert batch.wait(START_TIMEOUT_S) == 128 + signal.SIGTERM
    assert all(json.loads(line) for line in target.read_text().splitlines())
    assert not psutil.wait_procs(children, timeout=0)[1]
    assert not list(SHARED_MEMORY.glob(f"baton-up-{batch.pid}-*"))
