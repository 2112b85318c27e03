"""Both tiers as processes on a real checkpoint, driven over gRPC as a router drives them."""

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    request_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from rpc.channels import open_channel
from rpc.probe import wait_until_serving
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
NUM_TOKENS = 60


async def spawn(module, *args):
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *args,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=asyncio.subprocess.PIPE,
    )


async def port_of(process, port_file):
    """Returns the port that a process writes once it listens; fails with its log if it ends."""
    ended = asyncio.create_task(process.wait())
    async with asyncio.timeout(START_TIMEOUT_S):
        while not port_file.exists():
            if ended.done():
                pytest.fail((await process.stderr.read()).decode())
            await asyncio.sleep(0.05)
    ended.cancel()
    return int(port_file.read_text())


@asynccontextmanager
async def running_tier(module, tmp_path):
    """A serving process of one tier and a channel to it."""
    port_file = tmp_path / f"{module}.port"
    process = await spawn(
        module,
        f"--model={tiny_checkpoint('llama')}",
        f"--kv-connector=file://{tmp_path}/kv",
        "--kv-load-failure-policy=fail",  # a slow load is not given up for computing
        "--kv-cache-memory-bytes=16MiB",
        "--dtype=float32",
        "--num-threads=1",
        "--port=0",
        f"--port-file={port_file}",
    )
    try:
        address = f"127.0.0.1:{await port_of(process, port_file)}"
        await wait_until_serving(address, timeout_s=START_TIMEOUT_S)
        async with open_channel(address) as channel:
            yield process, channel
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def namespace_of(channel):
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    return (await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=10)).namespace


def spec_of(prompt):
    return request_pb2.RequestSpec(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=common_pb2.SamplingParams(temperature=0.0, seed=0),
        stopping=common_pb2.StoppingParams(max_tokens=NUM_TOKENS),
        timeout_ms=30_000,
    )


async def prefilled(channel, spec, namespace, decode_stream):
    """Returns the prompt's first tokens and handoff; forwards saved blocks to decode."""
    events = {}
    message = prefill_pb2.PrefillRequest(spec=spec, namespace=namespace)
    async for response in prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(message, timeout=30):
        kind = response.WhichOneof("event")
        events[kind] = getattr(response, kind)
        if kind == "saved":
            prefetch = decode_pb2.PrefetchKv(blocks=response.saved)
            await decode_stream.write(decode_pb2.ConnectRequest(prefetch=prefetch))
    return events["result"].outputs[0], events["end"].handoff


async def test_prefill_hands_over_and_decode_finishes_while_draining(tmp_path):
    prompt = prompt_of(37)
    expected = reference_greedy(tiny_checkpoint("llama"), prompt, NUM_TOKENS)
    async with asyncio.timeout(START_TIMEOUT_S), AsyncExitStack() as stack:
        (prefill_process, prefill_channel), (decode_process, decode_channel) = await asyncio.gather(
            *(
                stack.enter_async_context(running_tier(module, tmp_path))
                for module in ("worker.prefill", "worker.decode")
            )
        )
        namespace = await namespace_of(prefill_channel)
        assert namespace == await namespace_of(decode_channel)
        spec = spec_of(prompt)
        stream = decode_pb2_grpc.DecodeServiceStub(decode_channel).Connect()
        first, handoff = await prefilled(prefill_channel, spec, namespace, stream)
        assert handoff.num_tokens == len(prompt)

        start = decode_pb2.StartDecode(spec=spec, namespace=namespace, handoff=handoff)
        start.candidates.add(output_token_ids=first.token_ids)
        await stream.write(decode_pb2.ConnectRequest(start=start))
        outputs = [(await stream.read()).outputs[0]]
        assert outputs[0].cached_tokens == len(prompt)
        decode_process.send_signal(signal.SIGTERM)
        while not outputs[-1].finish_reason:
            outputs += (await stream.read()).outputs
        assert outputs[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        received = [token for output in outputs for token in output.token_ids]
        assert [*first.token_ids, *received] == expected

        prefill_process.send_signal(signal.SIGINT)
        assert await prefill_process.wait() == 0
        assert await decode_process.wait() == 0


async def test_a_failed_start_prints_one_readable_line(tmp_path):
    modules = ("worker.prefill", "worker.decode")
    (model := tmp_path / "empty").mkdir()
    store = f"--kv-connector=file://{tmp_path}/kv"
    flags = (f"--model={model}", store, "--port=0", "--log-level=error")
    async with asyncio.timeout(START_TIMEOUT_S):
        processes = await asyncio.gather(*(spawn(module, *flags) for module in modules))
        logs = await asyncio.gather(*(process.communicate() for process in processes))
    for module, process, (_, stderr) in zip(modules, processes, logs, strict=True):
        assert process.returncode == 2
        (line,) = stderr.decode().splitlines()
        assert line.startswith(f"baton {module.removeprefix('worker.')}: error: ")
        assert str(model) in line


async def test_a_prefill_replica_without_a_connector_is_refused(tmp_path):
    process = await spawn("worker.prefill", f"--model={tmp_path}", "--port=0")
    async with asyncio.timeout(START_TIMEOUT_S):
        _, stderr = await process.communicate()
    assert process.returncode == 2
    assert stderr.decode().splitlines() == [
        "baton prefill: error: --kv-connector is not set; a prefill worker needs it to hand KV over"
    ]
