"""The flags of a cluster that a command starts and disturbs or observes."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from baton.common.errors import ConfigurationError
from baton.common.model_files.named_models import NAMED_MODELS
from benchmarks.chaos.cluster import ChaosCluster, running_chaos_cluster
from engine.config import EngineConfig

__all__ = ["add_cluster_args", "check_least", "cluster_in_words", "cluster_of"]

_MAX_MODEL_LEN = 512


def add_cluster_args(
    parser: argparse.ArgumentParser, *, routers: int, prefill: int, decode: int
) -> None:
    """Adds the flags of a cluster's model, connector and processes, with default numbers."""
    add = parser.add_argument
    add("--model", default="demo", metavar="MODEL", help="folder or name (default: demo)")
    add(
        "--kv-connector",
        default="redis://",
        metavar="URL",
        help="redis:// starts a Redis server of its own, shm:// makes a store of its own "
        "(default: redis://)",
    )
    add("--routers", type=int, default=routers, metavar="N")
    add("--prefill", type=int, default=prefill, metavar="N", help="prefill workers")
    add("--decode", type=int, default=decode, metavar="N", help="decode workers")
    add("--show-logs", action="store_true", help="write the processes' output to stderr")


def check_least(
    args: argparse.Namespace, *, not_negative: Sequence[str] = (), positive: Sequence[str] = ()
) -> None:
    """Refuses values that are too small, those of the cluster's processes included.

    Raises:
        ConfigurationError: names the flag.
    """
    for flag in ("prefill", *not_negative):
        if getattr(args, flag) < 0:
            raise _too_small(args, flag, ">= 0")
    for flag in ("routers", "decode", *positive):
        if getattr(args, flag) <= 0:
            raise _too_small(args, flag, "> 0")


def _too_small(args: argparse.Namespace, flag: str, limit: str) -> ConfigurationError:
    name = flag.replace("_", "-")
    return ConfigurationError(f"--{name} is {getattr(args, flag)}; it must be {limit}")


def cluster_of(
    args: argparse.Namespace, kv_cache_bytes: int
) -> AbstractAsyncContextManager[ChaosCluster]:
    """Returns a context that runs the cluster of parsed flags; each pool has that many bytes."""
    model = NAMED_MODELS[args.model]() if args.model in NAMED_MODELS else Path(args.model)
    engine = EngineConfig(
        model=str(model),
        kv_connector=args.kv_connector,
        dtype="float32",
        max_model_len=_MAX_MODEL_LEN,
        kv_cache_memory_bytes=kv_cache_bytes,
    )
    return running_chaos_cluster(
        engine,
        num_routers=args.routers,
        num_prefill=args.prefill,
        num_decode=args.decode,
        log=args.show_logs,
    )


def cluster_in_words(args: argparse.Namespace) -> str:
    """Describes the cluster for a report."""
    return (
        f"{args.routers} routers, {args.prefill} prefill, {args.decode} decode, {args.kv_connector}"
    )
