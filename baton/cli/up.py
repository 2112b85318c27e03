"""`baton up`: a whole cluster on this machine, and its demonstration."""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from baton.cli.generate import DEFAULT_ADDRESS, print_stream
from baton.cli.unread_output import discard_unread_output
from baton.client import Client
from baton.demo import DEMO_PROMPT, demo_model_path
from baton.sampling_params import SamplingParams
from baton.up.cluster import ClusterConfig, ClusterPlan, plan_cluster, run_cluster
from baton.up.run_folder import embedded_store, taking_turns
from engine.cli_args import add_engine_args, engine_config_from_args
from rpc.server_config import ServerConfig

__all__ = ["add_args", "main"]

_DEFAULT_HOST, _, _DEFAULT_PORT = DEFAULT_ADDRESS.partition(":")
_TRY_PROMPT = "Return a list of"
_DEMO_PARAMS = SamplingParams(temperature=0.0, max_tokens=64)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model", help="checkpoint folder or Hugging Face Hub name (default: the demo model)"
    )
    parser.add_argument(
        "--demo", action="store_true", help="complete a prompt once the cluster is up"
    )
    for tier, text in (
        ("prefill", "prefill workers; 0: decode does both"),
        ("decode", "decode workers"),
    ):
        parser.add_argument(
            f"--{tier}", type=int, default=1, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--kv-connector",
        metavar="URL",
        help="where KV is handed over: shm://NAME, file:///path, redis://host:port/db "
        "(default: a store in shared memory that goes with the cluster)",
    )
    parser.add_argument("--host", default=_DEFAULT_HOST, help="the router's address (%(default)s)")
    parser.add_argument(
        "--port",
        type=int,
        default=int(_DEFAULT_PORT),
        help="the router's port; 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning", "error"),
        help="of every process (default: %(default)s)",
    )
    parser.add_argument(
        "--turns",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="workers on the CPU compute one at a time, in turn (default: %(default)s)",
    )
    add_engine_args(parser, omit=("model", "role", "kv_connector", "turns_folder"))


def main(args: argparse.Namespace) -> int:
    """Runs a router, prefill and decode workers on this machine, and restarts those
    that die. Ctrl-C stops everything: the router first, then the workers.
    Engine flags go to every worker.
    """
    with _running_config(args) as config:
        plan = plan_cluster(config)
        asyncio.run(run_cluster(plan, _write_line, lambda: _greet(plan, args.demo)))
    return 0


@contextmanager
def _running_config(args: argparse.Namespace) -> Iterator[ClusterConfig]:
    """What to run, with the folders that go with it."""
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
    )


def _write_line(line: str) -> None:
    """Writes to the log. The cluster goes on if nobody can read it."""
    try:
        sys.stderr.write(f"{line}\n")
    except OSError:
        discard_unread_output()


async def _greet(plan: ClusterPlan, with_demo: bool) -> None:
    """Says where everything listens, after a first completion if asked."""
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
