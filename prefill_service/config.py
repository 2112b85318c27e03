"""`PrefillConfig` and its flags."""

import argparse
from dataclasses import dataclass

from engine.cli_args import add_engine_args, engine_config_from_args
from engine.config import EngineConfig
from rpc.metrics_server import MetricsConfig, add_metrics_args, metrics_config_from_args
from rpc.server_config import ServerConfig, add_server_args, server_config_from_args

__all__ = ["UNUSED_FIELDS", "PrefillConfig", "add_args", "config_from_args"]

DEFAULT_PORT = 50061
UNUSED_FIELDS = ("kv_load_failure_policy", "kv_publish")
"""Fields of `EngineConfig` that mean nothing to a prefill engine: it publishes all prompts, and
computes what it cannot load."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Where a prefill server listens and serves its metrics, and its engine."""

    server: ServerConfig
    metrics: MetricsConfig
    engine: EngineConfig


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a prefill server."""
    add_server_args(parser, default_port=DEFAULT_PORT)
    add_metrics_args(parser)
    add_engine_args(parser, omit=("role", *UNUSED_FIELDS))


def config_from_args(args: argparse.Namespace) -> PrefillConfig:
    """The config that parsed flags describe.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """
    return PrefillConfig(
        server=server_config_from_args(args),
        metrics=metrics_config_from_args(args),
        engine=engine_config_from_args(args, role="prefill"),
    )
