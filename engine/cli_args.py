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
from baton.common.flags.vllm_arguments import FIXED_ARGUMENTS, FixedArgument
from baton.common.model_files.named_models import HubFlags, with_revision
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


def _add_fixed_args(parser: argparse.ArgumentParser, omit: Collection[str]) -> None:
    """Adds vLLM's usual flags that Baton lacks, so that its command lines work."""
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for name, argument in FIXED_ARGUMENTS.items():
        if not argument.flags or name in omit:
            continue
        if False in argument.values:
            parser.add_argument(*argument.flags, action=_switch(argument), **hidden)
        else:
            parser.add_argument(*argument.flags, type=_only(argument), **hidden)


def _only(argument: FixedArgument) -> Callable[[str], str]:
    """Returns a parser that refuses other values than those of an argument."""
    values = [str(value).lower() for value in argument.values or (None,)]

    def parse(text: str) -> str:
        if text.lower() not in values:
            limit = f"it must be {' or '.join(values)}: {argument.reason}"
            raise argparse.ArgumentTypeError(f"{text!r} is not supported; {limit}")
        return text

    return parse


def _switch(argument: FixedArgument) -> type[argparse.Action]:
    """Returns the action of a switch whose `--no-NAME` does nothing, and which cannot be on."""

    class Switch(argparse.BooleanOptionalAction):
        @override
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: Any,
            option_string: str | None = None,
        ) -> None:
            if not (option_string or "").startswith("--no-"):
                raise argparse.ArgumentError(self, argument.reason)

    return Switch
