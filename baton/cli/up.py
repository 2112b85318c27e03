"""`baton up`: runs a whole cluster on this machine, with an optional demonstration."""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from baton.cli import discard_unread_output
from baton.cli.generate import DEFAULT_ADDRESS, print_stream
from baton.client import Client
from baton.demo import DEMO_PROMPT, demo_model_path
from baton.sampling_params import SamplingParams
from baton.up.cluster import ClusterConfig, ClusterPlan, plan_cluster, run_cluster
from baton.up.run_folder import embedded_store, taking_turns
from engine.cli_args import add_engine_args, engine_config_from_args
from router.config import GENERATION_CONFIGS
from rpc.server_config import ServerConfig

__all__ = ["add_args", "main"]

_DEFAULT_HOST, _, _DEFAULT_PORT = DEFAULT_ADDRESS.partition(":")
_TRY_PROMPT = "Return a list of"
_DEMO_PARAMS = SamplingParams(temperature=0.0, max_tokens=64)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model",
        help="checkpoint folder, GGUF file, smollm2, or Hugging Face Hub name (default: demo)",
    )
    parser.add_argument(
        "--demo", action="store_true", help="complete a prompt when the cluster is ready"
    )
    for tier, text in (
        ("prefill", "number of prefill workers; with 0, decode workers compute prompts too"),
        ("decode", "number of decode workers"),
    ):
        parser.add_argument(
            f"--{tier}", type=int, default=1, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--kv-connector",
        metavar="URL",
        help="KV connector: shm://NAME, file:///path, redis://host:port/db, grpc://, nixl:// "
        "(default: a store in shared memory that is removed with the cluster)",
    )
    parser.add_argument(
        "--host", default=_DEFAULT_HOST, help="address the router listens on (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=int(_DEFAULT_PORT),
        help="the router's port; 0 picks a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--generation-config",
        default="auto",
        choices=GENERATION_CONFIGS,
        help="the router's: use the sampling defaults of the model's generation_config.json (auto) "
        "or not (none) (default: %(default)s)",
    )
    for mark, text in (("start", "before"), ("end", "after")):
        parser.add_argument(
            f"--reasoning-{mark}-str",
            metavar="TEXT",
            help=f"the router's: text {text} the part in which the model reasons",
        )
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning", "error"),
        help="log level of every process (default: %(default)s)",
    )
    parser.add_argument(
        "--turns",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let workers on the CPU compute one at a time, in turn (default: %(default)s)",
    )
    add_engine_args(parser, omit=("model", "role", "kv_connector", "turns_folder"))


def main(args: argparse.Namespace) -> int:
    """Runs a router, prefill workers and decode workers on this machine.

    Processes that die are restarted. Ctrl-C stops the router first, then the workers.
    Every worker gets the engine flags.
    """
    with _running_config(args) as config:
        plan = plan_cluster(config)
        asyncio.run(run_cluster(plan, _write_line, lambda: _on_ready(plan, args.demo)))
    return 0


@contextmanager
def _running_config(args: argparse.Namespace) -> Iterator[ClusterConfig]:
    """Makes the folders that the cluster uses, and its config; removes the folders at the end."""
    with ExitStack() as folders:
        kv_connector = args.kv_connector or folders.enter_context(embedded_store())
        config = _config_from_args(args, kv_connector)
        yield folders.enter_context(taking_turns(config)) if args.turns else config


def _config_from_args(args: argparse.Namespace, kv_connector: str) -> ClusterConfig:
    return ClusterConfig(
        engine=engine_config_from_args(
            args,
            model=args.model or str(demo_model_path()),
            kv_connector=kv_connector,
        ),
        num_prefill=args.prefill,
        num_decode=args.decode,
        router=ServerConfig(host=args.host, port=args.port),
        log_level=args.log_level,
        generation_config=args.generation_config,
        reasoning_start_str=args.reasoning_start_str,
        reasoning_end_str=args.reasoning_end_str,
    )


def _write_line(line: str) -> None:
    """Writes to the log. If the reader has closed the pipe, the cluster keeps running."""
    try:
        sys.stderr.write(f"{line}\n")
    except OSError:
        discard_unread_output()


async def _on_ready(plan: ClusterPlan, with_demo: bool) -> None:
    """Streams the demonstration if asked for, then prints every server's address."""
    try:
        if with_demo:
            await asyncio.to_thread(_stream_demo, plan.router.address)
        _print_addresses(plan)
    except BrokenPipeError:
        discard_unread_output()


def _print_addresses(plan: ClusterPlan) -> None:
    for server in (plan.router, *plan.workers):
        print(f"{server.spec.name:<10} {server.address}")
    command = [sys.argv[0], "generate", _TRY_PROMPT, "--address", plan.router.address]
    print(f"\nTry it:\n  {shlex.join(command)}")
    print("Ctrl-C stops everything.", flush=True)


def _stream_demo(address: str) -> None:
    print(DEMO_PROMPT, end="", flush=True)
    with Client(address) as client:
        print_stream(client.stream(DEMO_PROMPT, _DEMO_PARAMS, timeout_s=120))
    print()
