"""The flags of a cluster, and its config from parsed flags."""

import argparse
from collections.abc import Collection, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any

from baton.common.flags.config_flags import config_from_args
from baton.up.gpus import default_workers, visible_gpus
from baton.up.plan import ClusterConfig, RayTiers, worker_targets
from engine.cli_args import add_engine_args, engine_config_from_args
from engine.config import EngineConfig
from router.config.endpoint_picker import EndpointPickerConfig
from router.config.processes import check_processes
from router.config.router import add_args as add_router_args
from router.config.router import router_config_from_args
from router.config.security import PLAIN_CALLS, WorkerTlsConfig
from rpc.stop_signals import exit_on_signals
from worker.processes.ray_nodes import engine_on_ray
from worker.processes.run_folder import embedded_store, new_token, sharing_machine

__all__ = ["add_cluster_args", "running_config"]

_NOT_ENGINE = (
    "model",
    "revision",
    "served_model_name",
    "kv_connector",
    "turns_folder",
    "weights_folder",
)
"""Flags of an engine that the router's flags or the command itself set."""
_NOT_ROUTER = (
    *("prefill", "decode", "models", "shutdown_delay_s"),
    *("token_file", "identities", "server_name"),
    *(field.name for field in fields(WorkerTlsConfig)),
    *(field.name for field in fields(EndpointPickerConfig)),
)
"""Fields of the router's configs that the command sets."""
_PLAIN_WORKERS = WorkerTlsConfig(cluster_ssl_ca_certs=PLAIN_CALLS)
"""Workers listen on loopback alone, where the token suffices, or on a Ray cluster's network."""
_DRAIN_TIMEOUT_S = 5.0
"""Ctrl-C in a terminal should not take long."""
_DEMO_MODEL = "demo"


def add_cluster_args(
    parser: argparse.ArgumentParser, *, omit: Collection[str] = (), **defaults: Any
) -> None:
    """Adds the flags of a cluster: its own, the router's and the engine's.

    Args:
        parser: gets the flags.
        omit: names of further fields of the router's configs that get no flag.
        defaults: by field of the router's configs, defaults that differ from those of
            `baton serve`.
    """
    for tier, text in (
        (
            "prefill",
            "number of prefill workers; with 0, decode workers compute prompts too (default: 1; 0 "
            "with one GPU and no --decode-workers)",
        ),
        ("decode", "number of decode workers (default: 1)"),
    ):
        # The second name is that of earlier versions.
        flag, dest = f"--{tier}-workers", f"{tier}_workers"
        parser.add_argument(flag, type=int, metavar="N", help=text)
        parser.add_argument(
            f"--{tier}", type=int, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    parser.add_argument(
        "--router-processes",
        type=int,
        default=1,
        metavar="N",
        help="number of processes that serve at the router's ports (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-connector",
        metavar="URL",
        help="KV connector: shm://NAME, file:///path, redis://host:port/db, grpc://, nixl:// "
        "(default: a store in shared memory that is removed with the cluster)",
    )
    parser.add_argument(
        "--turns",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let workers on the CPU compute one at a time, in turn (default: %(default)s)",
    )
    own_defaults = {
        "model": _DEMO_MODEL,
        "log_level": "warning",
        "drain_timeout_s": _DRAIN_TIMEOUT_S,
    }
    add_router_args(parser, omit=(*_NOT_ROUTER, *omit), defaults={**own_defaults, **defaults})
    add_engine_args(parser, omit=_NOT_ENGINE)


@contextmanager
def running_config(
    args: argparse.Namespace, ray_address: str | None = None
) -> Generator[ClusterConfig, None, None]:
    """Makes the folders that the cluster uses, and its config; removes the folders at the end.

    Args:
        args: flags that `add_cluster_args` added.
        ray_address: of the Ray cluster on whose nodes the workers run; None for this machine.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
        SystemExit: SIGTERM or SIGHUP came, and no code in the block has a handler for it.
    """
    with exit_on_signals(), ExitStack() as folders:
        if ray_address is not None:
            config = cluster_config_from_args(args, args.kv_connector, is_on_ray=True)
            config = _on_ray(config, ray_address)
            engine = engine_on_ray(config.engine)
        else:
            kv_connector = args.kv_connector or folders.enter_context(embedded_store())
            config = cluster_config_from_args(args, kv_connector)
            takes_turns = args.turns and len(config.targets) > 1
            engine = folders.enter_context(sharing_machine(config.engine, turns=takes_turns))
        token, token_file = folders.enter_context(new_token())
        yield replace(config, engine=engine, token=token, token_file=token_file)


def _on_ray(config: ClusterConfig, address: str) -> ClusterConfig:
    """Returns the config of a cluster whose workers Ray places: each tier is one target."""
    model = config.model
    sizes = {"prefill": len(model.prefill), "decode": len(model.decode)}
    tiers = replace(model, prefill=model.prefill[:1], decode=model.decode[:1])
    router = replace(config.router, models=(tiers,))
    return replace(config, router=router, ray=RayTiers(address, sizes))


def cluster_config_from_args(
    args: argparse.Namespace, kv_connector: str | None, *, is_on_ray: bool = False
) -> ClusterConfig:
    """Returns the config that parsed flags describe.

    Args:
        args: flags that `add_cluster_args` added.
        kv_connector: URL of the connector of all workers.
        is_on_ray: whether the workers run on the nodes of a Ray cluster.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """
    check_processes("--router-processes", args.router_processes)
    prefill, decode = worker_targets(*_num_workers(args, is_on_ray=is_on_ray))
    router = router_config_from_args(args, prefill=prefill, decode=decode)
    engine = engine_config_from_args(
        args,
        model=router.models[0].model,
        served_model_name=router.models[0].names[0],
        kv_connector=kv_connector,
    )
    security = replace(router.security, workers=_PLAIN_WORKERS)
    return ClusterConfig(
        engine=engine,
        router=replace(router, security=security),
        router_processes=args.router_processes,
    )


def _num_workers(args: argparse.Namespace, *, is_on_ray: bool) -> tuple[int, int]:
    """Returns the numbers of prefill and of decode workers."""
    numbers = args.prefill_workers, args.decode_workers
    if numbers == (None, None) and not is_on_ray:
        engine = config_from_args(EngineConfig, args, model=_DEMO_MODEL)
        return default_workers(visible_gpus(), engine)
    num_prefill, num_decode = (1 if number is None else number for number in numbers)
    return num_prefill, num_decode
