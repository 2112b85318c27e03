"""`python -m router` as a process: its imports, its start and its shutdown."""

import asyncio
import os
import signal
import sys

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import generation_pb2_grpc
from rpc.channels import open_channel
from tests.support.fake_workers import MODEL, FakeDecode, FakePrefill, running_workers
from tests.support.running_router import request, script_of, token_ids_of
from tests.support.tokenizer_folders import write_byte_level_folder

TEXT = "The quick brown fox jumps over the lazy dog."


async def start_router(tmp_path, *flags):
    model = write_byte_level_folder(tmp_path / MODEL)
    command = ["-X", "importtime", "-m", "router", "--model", str(model)]
    command += ["--port", "none", "--grpc-port", "0"]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *("--grpc-port-file", str(tmp_path / "port"), *flags),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        limit=2**20,
    )


async def port_of(process, tmp_path, log: list[bytes]) -> int:
    """Returns the port, once the router's log on stderr says that it listens."""
    async for line in process.stderr:
        log.append(line)
        if b"listening" in line:
            return int((tmp_path / "port").read_text())
    raise AssertionError(b"".join(log).decode())


async def until_serving(channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
        pass
    watch.cancel()


@pytest.mark.parametrize(("choice", "num_tokens"), [("auto", 5), ("none", 16)])
async def test_the_process_takes_defaults_from_the_generation_config(tmp_path, choice, num_tokens):
    decode = FakeDecode([300] * 99)
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "generation_config.json").write_text('{"max_new_tokens": 5}')
    async with running_workers(decode), asyncio.timeout(60):
        flags = ("--decode", decode.address, "--generation-config", choice)
        process = await start_router(tmp_path, *flags)
        try:
            port = await port_of(process, tmp_path, [])
            async with open_channel(f"127.0.0.1:{port}") as channel:
                await until_serving(channel)
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                response = await stub.Generate(request("hello " * 20))
        finally:
            process.kill()
            await process.communicate()
    assert response.usage.completion_tokens == num_tokens


async def test_the_router_serves_drains_and_never_imports_torch(tmp_path):
    script = script_of(TEXT)
    prefill, decode = FakePrefill(script), FakeDecode(script, pause_after=3)
    log: list[bytes] = []
    async with running_workers(prefill, decode), asyncio.timeout(60):
        flags = ("--decode", decode.address, "--prefill", prefill.address)
        process = await start_router(tmp_path, *flags)
        try:
            port = await port_of(process, tmp_path, log)
            async with open_channel(f"127.0.0.1:{port}") as channel:
                await until_serving(channel)
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                call = stub.GenerateStream(request("hello " * 20, max_tokens=len(script)))
                responses = [await call.read()]
                (watchdog,) = psutil.Process(process.pid).children()
                assert "watchdog_process.py" in " ".join(watchdog.cmdline())
                # The router drains: the running request continues, and a new one goes elsewhere.
                process.send_signal(signal.SIGTERM)
                await until_closed(port)
                # Over a new connection: a call on the present one may have reached the router.
                options = (("grpc.use_local_subchannel_pool", 1),)
                async with open_channel(f"127.0.0.1:{port}", options=options) as late:
                    late_stub = generation_pb2_grpc.GenerationServiceStub(late)
                    with pytest.raises(grpc.aio.AioRpcError, match="refused") as refused:
                        await late_stub.Generate(request([5, 6], max_tokens=1))
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                decode.resume()
                while (response := await call.read()) is not grpc.aio.EOF:
                    responses.append(response)
            log += (await process.stderr.read()).splitlines()
            assert await process.wait() == 0
            assert not watchdog.is_running()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert token_ids_of(responses) == script
    imported = {line.rpartition(b"|")[2].strip() for line in log if b"|" in line}
    assert b"router.stages.pipeline" in imported
    assert not imported & {b"torch", b"transformers", b"numpy", b"engine", b"kernels"}


async def until_closed(port: int) -> None:
    """Returns once nothing listens at a port."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return
        except ConnectionResetError:  # it was in the queue of the socket that closed
            continue
        writer.close()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--decode", "nowhere"), "target 'nowhere' must be host:port"),
        (("--decode", "h:1", "--default-timeout-s", "0"), "--default-timeout-s is 0.0"),
        (("--decode", ","), "--decode is missing"),
    ],
)
async def test_a_bad_flag_is_reported_in_one_line(tmp_path, flags, message):
    process = await start_router(tmp_path, *flags)
    log = await process.stderr.read()
    assert await process.wait() == 2
    lines = [line for line in log.decode().splitlines() if "error:" in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert b"Traceback" not in log
