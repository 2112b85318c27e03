"""The engine's command-line flags: those of `EngineConfig`, and vLLM's that have one value here.

Torch-free, so that every command's `--help` is quick.
"""

import argparse
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from typing_extensions import override

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.model_files.hub_names import HubFlags, with_revision
from engine.config import EngineConfig
from kvstore.handoff import connector_name
from kvstore.registry import connector_capabilities

__all__ = ["add_engine_args", "engine_config_from_args"]


def add_engine_args(parser: argparse.ArgumentParser, *, omit: Collection[str] = ()) -> None:
    """Adds one flag per `EngineConfig` field, with dashes for underscores.

    Args:
        parser: gets the flags, in a group of their own.
        omit: names of fields that get no flag; pass their values to
            `engine_config_from_args`. Also names of vLLM's flags that the command has itself.
    """
    add_flags(parser, EngineConfig, "engine", omit=omit)
    add_flags(parser, HubFlags, "engine", omit=omit)
    _add_fixed_args(parser, omit)


def engine_config_from_args(args: argparse.Namespace, **overrides: Any) -> EngineConfig:
    """The config that parsed flags describe; `overrides` win over them.

    Only server processes have these flags; their connector must reach other processes.

    Raises:
        ConfigurationError: a value is out of range, or the connector is of one
            process only; names the flag.
    """
    config = config_from_args(EngineConfig, args, **overrides)
    revision = config_from_args(HubFlags, args).revision
    config = replace(config, model=with_revision(config.model, revision))
    if config.kv_connector is not None:
        _check_shared(config.kv_connector)
    return config


def _check_shared(kv_connector: str) -> None:
    if not connector_capabilities(kv_connector).shared_between_processes:
        raise ConfigurationError(
            f"--kv-connector {connector_name(kv_connector)}:// is shared within one process only; "
            "between processes use shm://NAME, file:///path, redis://host:port/db, grpc:// or nixl://"
        )


_FIXED_ARGS = (
    (("--data-parallel-size", "-dp"), "1"),
    (("--quantization", "-q"), "none"),
)
"""Flags of vLLM that are accepted with their usual value, so that its command lines work."""


def _add_fixed_args(parser: argparse.ArgumentParser, omit: Collection[str]) -> None:
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for names, value in _FIXED_ARGS:
        if names[0][2:].replace("-", "_") not in omit:
            parser.add_argument(*names, type=_only(value), **hidden)
    parser.add_argument("--download-dir", type=_no_download_dir, **hidden)
    parser.add_argument("--trust-remote-code", action=_NoRemoteCode, **hidden)


def _only(value: str) -> Callable[[str], str]:
    """Returns a parser that refuses all texts but `value`."""

    def parse(text: str) -> str:
        if text.lower() != value:
            raise argparse.ArgumentTypeError(f"{text!r} is not supported; it must be {value}")
        return value

    return parse


def _no_download_dir(_: str) -> str:
    raise argparse.ArgumentTypeError("set the environment variable HF_HUB_CACHE instead")


class _NoRemoteCode(argparse.BooleanOptionalAction):
    """`--no-trust-remote-code` does nothing, and `--trust-remote-code` is refused."""

    @override
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Refuses the flag."""
        if not (option_string or "").startswith("--no-"):
            raise argparse.ArgumentError(self, "Baton runs no code from checkpoints")
