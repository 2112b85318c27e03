"""`baton bench agreement`: greedy tokens of two tiers and of one worker, beside transformers'.

The workers are engines in this process behind the services of a prefill and a decode worker, and
this process calls them over gRPC as a router does. So it needs no more than gRPC and transformers.
"""

import argparse
import asyncio
import gc
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.machine import describe_gpu_machine
from benchmarks.models import RANDOM_MODELS, cached_random_model, resolve_model
from benchmarks.output import (
    add_device_arg,
    add_number,
    add_numbers,
    add_output_args,
    check_output_args,
    report_of_run,
    write_report,
    write_so_far,
)
from benchmarks.report import Report, Table
from benchmarks.workloads.kind import refuse_below
from engine.config import EngineConfig

if TYPE_CHECKING:
    import grpc

    from engine.loop.async_engine import AsyncEngine

__all__ = ["add_args", "main"]

_CALL_S = 120.0
_VOCABULARY = 2000  # smaller than every model's
_SPARE_TOKENS = 16
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class _Side:
    """The tokens of one way to serve the prompts.

    Attributes:
        name: "one worker", "two tiers" or "transformers".
        tokens: of each prompt.
        seconds: for all of them, without the start.
    """

    name: str
    tokens: list[list[int]]
    seconds: float


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model",
        choices=list(RANDOM_MODELS),
        help="random weights, made when needed (default: the demo model)",
    )
    add_device_arg(parser, "where all sides compute")
    add_numbers(parser, "--input-len", [5, 100, 500], "tokens of each prompt")
    add_number(parser, "--output-len", 24, "tokens to generate for each")
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Serves prompts through one worker, and through a prefill and a decode worker, over gRPC, and
    compares the greedy tokens of both with those of transformers, all in float32. The file of
    --json is written anew after each side. Exit status 1: tokens differ.
    """
    check_output_args(args)
    refuse_below(1, output_len=args.output_len, input_len=min(args.input_len))
    draw = random.Random(0)
    prompts = [[draw.randrange(_VOCABULARY) for _ in range(length)] for length in args.input_len]
    machine, sides = describe_gpu_machine(args.device), list[_Side]()

    def add(side: _Side) -> None:
        sides.append(side)
        write_so_far(args, lambda: _report(args, machine, sides))

    folder = _model_folder(args)
    add(_run_transformers(folder, args.device, prompts, args.output_len))
    for side in (_run_one_worker, _run_two_tiers):
        add(asyncio.run(side(_config(folder, args), prompts, args.output_len)))
        _free_memory(args.device)
    write_report(_report(args, machine, sides), args)
    return int(any(side.tokens != sides[0].tokens for side in sides))


def _model_folder(args: argparse.Namespace) -> str:
    if args.model is None:
        return resolve_model(None)
    # On a GPU a model of a billion weights is made in seconds.
    return str(cached_random_model(args.model, device=args.device))


def _config(folder: str, args: argparse.Namespace) -> EngineConfig:
    longest = max(args.input_len) + args.output_len + _SPARE_TOKENS
    return EngineConfig(
        model=folder,
        dtype="float32",
        device=args.device,
        max_model_len=longest,
        max_num_seqs=8,
        num_gpu_blocks_override=2 * len(args.input_len) * -(-longest // _BLOCK_SIZE),
        async_scheduling=args.device == "cuda",
        max_step_ms=0,
    )


def _report(args: argparse.Namespace, machine: dict[str, object], sides: Sequence[_Side]) -> Report:
    rows = [
        (side.name, side.seconds, "yes" if side.tokens == sides[0].tokens else "NO")
        for side in sides
    ]
    columns = ("", "seconds", "the tokens of transformers")
    prompts = ", ".join(map(str, args.input_len))
    return report_of_run(
        args,
        f"Greedy tokens of {args.model or 'the demo model'} in float32",
        [Table("Sides", columns, rows, f"Prompts of {prompts} tokens.")],
        machine=machine,
        sides=[asdict(side) | {"agrees": side.tokens == sides[0].tokens} for side in sides],
    )


def _run_transformers(
    folder: str, device: str, prompts: Sequence[Sequence[int]], num_tokens: int
) -> _Side:
    """Computes every token from its whole text: the plainest way."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device).eval()
    started, answers = time.perf_counter(), list[list[int]]()
    with torch.inference_mode():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(num_tokens):
                ids = torch.tensor([tokens], device=device)
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
                tokens.append(int(logits[0, -1].argmax()))
            answers.append(tokens[len(prompt) :])
    seconds = time.perf_counter() - started
    del model
    _free_memory(device)
    return _Side("transformers", answers, seconds)


def _free_memory(device: str) -> None:
    """Returns the memory of models and engines that are gone to the device."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


async def _run_one_worker(
    config: EngineConfig, prompts: Sequence[Sequence[int]], num_tokens: int
) -> _Side:
    async with _serving(config) as (engine, channel):
        started = time.perf_counter()
        answers = [
            await _decode(channel, engine.namespace, _spec(index, prompt, num_tokens))
            for index, prompt in enumerate(prompts)
        ]
        return _Side("one worker", answers, time.perf_counter() - started)


async def _run_two_tiers(
    config: EngineConfig, prompts: Sequence[Sequence[int]], num_tokens: int
) -> _Side:
    with TemporaryDirectory(prefix="baton-agreement-") as folder:
        config = replace(
            config,
            kv_connector=f"file://{folder}",
            kv_load_failure_policy="fail",  # or decode would compute the prompt, as one worker does
        )
        async with _serving(config) as (prefill, to_prefill), _serving(config) as (_, to_decode):
            started = time.perf_counter()
            answers = []
            for index, prompt in enumerate(prompts):
                spec = _spec(index, prompt, num_tokens)
                first, handoff = await _prefill(to_prefill, prefill.namespace, spec)
                answers.append(await _decode(to_decode, prefill.namespace, spec, first, handoff))
            return _Side("two tiers", answers, time.perf_counter() - started)


@asynccontextmanager
async def _serving(
    config: EngineConfig,
) -> "AsyncGenerator[tuple[AsyncEngine, grpc.aio.Channel], None]":
    """Runs an engine behind the services of both tiers; yields it, and a channel to them."""
    import grpc

    from baton.v1 import decode_pb2_grpc, prefill_pb2_grpc
    from decode_service.servicer import DecodeServicer
    from engine.loop.async_engine import AsyncEngine
    from engine.runtime.device import with_device_defaults
    from prefill_service.servicer import PrefillServicer

    engine = await AsyncEngine.start(with_device_defaults(config))
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(engine), server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(engine), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield engine, channel
    finally:
        await server.stop(None)
        await engine.close()


def _spec(index: int, prompt: Sequence[int], num_tokens: int) -> Any:
    from baton.v1 import common_pb2, request_pb2

    return request_pb2.RequestSpec(
        request_id=f"agreement-{index}",
        prompt_token_ids=prompt,
        sampling=common_pb2.SamplingParams(temperature=0.0, seed=0),
        stopping=common_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
        timeout_ms=round(1000 * _CALL_S),
    )


async def _prefill(
    channel: "grpc.aio.Channel", namespace: bytes, spec: Any
) -> tuple[list[int], Any]:
    """Returns the first tokens of a prompt, and the handoff of its KV."""
    from baton.v1 import prefill_pb2, prefill_pb2_grpc

    first, handoff = list[int](), None
    message = prefill_pb2.PrefillRequest(spec=spec, namespace=namespace)
    async for response in prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(
        message, timeout=_CALL_S
    ):
        if response.HasField("result"):
            first = list(response.result.outputs[0].token_ids)
        elif response.HasField("end"):
            handoff = response.end.handoff
    return first, handoff


async def _decode(
    channel: "grpc.aio.Channel",
    namespace: bytes,
    spec: Any,
    first: Sequence[int] = (),
    handoff: Any = None,
) -> list[int]:
    """Returns all tokens of an answer.

    Raises:
        BatonError: the worker has reported an error.
    """
    from baton.v1 import decode_pb2, decode_pb2_grpc
    from rpc.errors import from_worker_error

    start = decode_pb2.StartDecode(spec=spec, namespace=namespace, handoff=handoff)
    if first:
        start.candidates.add(output_token_ids=first)
    tokens = list(first)
    stream = decode_pb2_grpc.DecodeServiceStub(channel).Connect(timeout=_CALL_S)
    await stream.write(decode_pb2.ConnectRequest(start=start))
    while True:
        response = await stream.read()
        assert isinstance(response, decode_pb2.ConnectResponse), "it ends with the answer"
        for output in response.outputs:
            tokens += output.token_ids
            if output.HasField("error"):
                raise from_worker_error(output.error)
            if output.is_last:
                stream.cancel()
                return tokens
