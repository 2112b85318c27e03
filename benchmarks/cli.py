"""`baton bench SUBCOMMAND`: each subcommand is a module with `add_args` and `main`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from baton.common.flags.parser import FlagParser

__all__ = ["add_args", "main"]


@dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand: the module of its `add_args(parser)` and `main(args)`, and its help."""

    module: str
    help: str


_COMMANDS = {
    "serve": _Command("benchmarks.serve_command", "a running endpoint, as its users see it"),
    "latency": _Command("benchmarks.latency_command", "batches on an engine in this process"),
    "throughput": _Command(
        "benchmarks.throughput_command", "a workload on an engine in this process"
    ),
    "kernels": _Command(
        "benchmarks.kernels_command", "primitives, compared with torch and their limits"
    ),
    "engine-step": _Command("benchmarks.engine_step_command", "where a step's time goes"),
    "agreement": _Command(
        "benchmarks.agreement_command", "greedy tokens, compared with those of transformers"
    ),
    "speculation": _Command("benchmarks.speculation_command", "draft tokens, compared with none"),
    "router": _Command(
        "benchmarks.router.command", "requests and streamed tokens in one router process"
    ),
    "split": _Command("benchmarks.split_command", "two tiers against one undivided engine"),
    "chaos": _Command(
        "benchmarks.chaos.command", "clients while processes are killed, frozen and restarted"
    ),
    "transfer": _Command(
        "benchmarks.transfer.command", "KV connectors, and transfers during prefill"
    ),
    "attention-sweep": _Command(
        "benchmarks.attention_sweep_command", "launch parameters of a GPU's attention"
    ),
    "compare": _Command("benchmarks.compare_command", "Baton, compared with other engines"),
    "quality": _Command(
        "benchmarks.quality.command",
        "next-token distributions of quantized weights, compared with float32",
    ),
    "record": _Command(
        "benchmarks.record_command", "again what README and docs/performance.md show"
    ),
    "scheduling": _Command("benchmarks.scheduling_command", "steps of the scheduler"),
}


class _LazyParser(FlagParser):
    """A parser that adds its flags on first use, so that other subcommands are not imported."""

    module = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Adds the module's flags, then parses."""
        if not self.is_filled:
            module = import_module(self.module)
            self.fill(module.main, module.add_args)
            self.set_defaults(run_benchmark=module.main)
        return super().parse_known_args(args, namespace)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands."""
    subparsers = parser.add_subparsers(
        dest="benchmark", metavar="SUBCOMMAND", required=True, parser_class=_LazyParser
    )
    for name, command in _COMMANDS.items():
        subparsers.add_parser(name, help=command.help).module = command.module


def main(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns its exit status."""
    run: Callable[[argparse.Namespace], int | None] = args.run_benchmark
    return run(args) or 0
