"""Flags of the commands that run an engine in this process, and what they stand for."""

import argparse
from pathlib import Path

from baton.demo import demo_model_path
from benchmarks.models import RANDOM_MODELS, cached_random_model
from engine.cli_args import add_engine_args, engine_config_from_args
from engine.config import EngineConfig

__all__ = ["add_offline_args", "offline_config", "resolve_model"]

_MODELS_FOLDER = Path("~/.cache/baton-bench")


def add_offline_args(parser: argparse.ArgumentParser) -> None:
    """Adds `--model` and the engine's flags."""
    add_model_arg(parser)
    add_engine_args(parser, omit=("model", "role", "served_model_name", "kv_connector"))


def add_model_arg(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`."""
    parser.add_argument(
        "--model",
        help="checkpoint folder or Hugging Face Hub name, or random weights made when needed: "
        f"{', '.join(RANDOM_MODELS)} (default: the demo model)",
    )


def offline_config(args: argparse.Namespace) -> EngineConfig:
    """The engine that parsed flags describe; it does both halves of the work.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """
    return engine_config_from_args(args, model=resolve_model(args.model), role="both")


def resolve_model(model: str | None) -> str:
    """A checkpoint folder or Hub name, from what `--model` says; makes random weights."""
    if model is None:
        return str(demo_model_path())
    if model in RANDOM_MODELS:
        return str(cached_random_model(model, _MODELS_FOLDER.expanduser()))
    return model
