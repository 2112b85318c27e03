"""`baton bench engine-step`: where the time of an engine's step goes."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models import add_offline_args, offline_config
from benchmarks.offline.cases import OfflineCase, make_cases
from benchmarks.output import (
    add_number,
    add_numbers,
    add_output_args,
    check_output_args,
    report_of_run,
    write_report,
    write_so_far,
)
from benchmarks.report import Panel, Report, Series, Table

if TYPE_CHECKING:
    from benchmarks.kernels.case import DecoderShape
    from benchmarks.offline.device_steps import DeviceStep
    from benchmarks.offline.kernel_times import StepKernels
    from benchmarks.offline.steps import StepProfile
    from engine.config import EngineConfig

__all__ = ["add_args", "main"]

_WARM_UP_STEPS = 8
_NUM_SHOWN = 12


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_numbers(parser, "--batch-size", [1, 8, 32], "requests that start together")
    add_numbers(parser, "--input-len", [128], "tokens of a prompt; on a CPU the first counts")
    add_number(parser, "--num-steps", 100, "decode steps per batch size")
    add_offline_args(parser)
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Profiles the steps of an engine in this process. On a CPU phase by phase, at several batch
    sizes: transfers, scheduling, executing (inputs, forward pass, draws), and committing. On a
    GPU, or with --async-scheduling, steps of the runner alone, launched ahead: decode steps, mixed
    ones, prompts, the device's share of them, and their kernels; and the engine's steps. The file
    of --json is then written anew after each figure. Exit status 1: a figure failed.
    """
    check_output_args(args)
    config = offline_config(args)

    from engine.runtime.device import resolve_device

    if config.async_scheduling or resolve_device(config.device).type == "cuda":
        return _measure_device(args, config)
    _profile_phases(args, config)
    return 0


def _profile_phases(args: argparse.Namespace, config: "EngineConfig") -> None:
    cases = make_cases(args.batch_size, args.input_len[:1], [args.num_steps])

    from benchmarks.offline.offline_engine import OfflineEngine
    from benchmarks.offline.steps import profile_steps

    profiles: list[StepProfile] = []
    with OfflineEngine(config) as engine:
        vocab_size = engine.core.info.vocab_size
        for case in cases:
            warm_up = OfflineCase(case.batch_size, case.input_len, _WARM_UP_STEPS)
            for seed in (1, 2):  # the runner records prompts of a size when the size is repeated
                engine.run(warm_up.requests(vocab_size, seed))
            profiles += profile_steps(engine, case.requests(vocab_size, seed=0))
    kinds = sorted({profile.kind for profile in profiles})  # decoding first
    report = report_of_run(
        args,
        f"Steps of {config.model_name}",
        [_table(kind, profiles) for kind in kinds],
        facts={"prompts": f"{args.input_len[0]} tokens"},
        panels=[_panel(kind, profiles) for kind in kinds],
        profiles=[asdict(profile) for profile in profiles],
    )
    write_report(report, args)


def _measure_device(args: argparse.Namespace, config: "EngineConfig") -> int:
    from benchmarks.offline.device_steps import chunk_tokens, measure_device_steps
    from benchmarks.offline.kernel_times import profile_device_steps
    from benchmarks.offline.offline_engine import OfflineEngine, measure_floors
    from engine.loop.core import EngineCore
    from engine.runtime.device import with_device_defaults
    from engine.runtime.model_runner import ModelRunner

    floors = measure_floors(config)  # before the pool takes the memory
    config = with_device_defaults(config)
    figures = _DeviceFigures(args, config, floors.machine)
    with ExitStack() as opened:
        runner = ModelRunner(config, progress=False)
        opened.callback(runner.close)
        engine = opened.enter_context(OfflineEngine(config, EngineCore(config, runner)))
        for step in measure_device_steps(
            engine,
            runner,
            floors,
            batch_sizes=args.batch_size,
            contexts=args.input_len,
            num_steps=args.num_steps,
            decoder=_decoder_shape(config.model),
        ):
            figures.add(step)
        context = args.input_len[0]
        for kernels in profile_device_steps(
            runner,
            batch_sizes=args.batch_size,
            context=context,
            num_chunk_tokens=chunk_tokens(context, config),
        ):
            figures.add(kernels)
    write_report(figures.report(), args)
    return int(any(figure.failed for figure in figures.all))


def _decoder_shape(model: str) -> "DecoderShape | None":
    """Returns the shape of a dense decoder in a folder; None for other models."""
    from benchmarks.kernels.case import DecoderShape

    path = Path(model) / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    is_dense = {"hidden_size", "intermediate_size", "num_key_value_heads"} <= set(config)
    return DecoderShape.of_config(config) if is_dense and "num_experts" not in config else None


class _DeviceFigures:
    """The figures so far; writes the file of --json anew after each."""

    def __init__(
        self, args: argparse.Namespace, config: "EngineConfig", machine: Mapping[str, Any]
    ) -> None:
        self._args, self._config, self._machine = args, config, machine
        self.steps: list[DeviceStep] = []
        self.kernels: list[StepKernels] = []

    def add(self, figure: "DeviceStep | StepKernels") -> None:
        """Takes a figure."""
        from benchmarks.offline.device_steps import DeviceStep

        if isinstance(figure, DeviceStep):
            self.steps.append(figure)
        else:
            self.kernels.append(figure)
        write_so_far(self._args, self.report)

    @property
    def all(self) -> "list[DeviceStep | StepKernels]":
        """All figures."""
        return [*self.steps, *self.kernels]

    def report(self) -> Report:
        """Returns the report of all figures."""
        failed = [
            f"{f.kind}, {f.batch_size} x {f.context}: {f.failed}" for f in self.all if f.failed
        ]
        columns = (
            *("", "sequences", "context", "us", "floor, us", "x floor"),
            *("floor of operations, us", "x", "device idle"),
        )
        rows = [
            (
                *(step.kind, step.batch_size, step.context, step.median_us),
                *(step.floor_us, _ratio(step.median_us, step.floor_us)),
                *(step.operations_floor_us, _ratio(step.median_us, step.operations_floor_us)),
                step.idle_share,
            )
            for step in self.steps
        ]
        return report_of_run(
            self._args,
            f"Steps of {self._config.model_name}",
            [
                Table("Steps", columns, rows, "; ".join(["Medians.", *failed])),
                *(_kernel_table(kernels) for kernels in self.kernels if kernels.kernels),
            ],
            machine=self._machine,
            steps=[asdict(step) for step in self.steps],
            kernels=[asdict(kernels) for kernels in self.kernels],
        )


def _ratio(taken_us: float | None, least_us: float | None) -> float | None:
    return taken_us / least_us if taken_us and least_us else None


def _kernel_table(kernels: "StepKernels") -> Table:
    rows = [(kernel.name, kernel.calls, kernel.us) for kernel in kernels.kernels[:_NUM_SHOWN]]
    title = f"Kernels of a {kernels.kind} step, {kernels.batch_size} x {kernels.context}"
    return Table(title, ("", "calls", "us"), rows)


def _of_kind(kind: str, profiles: Iterable["StepProfile"]) -> list["StepProfile"]:
    return [profile for profile in profiles if profile.kind == kind]


def _table(kind: str, profiles: Sequence["StepProfile"]) -> Table:
    """Returns a row per phase: for each batch size, its median and its share of the step."""
    own = _of_kind(kind, profiles)
    columns = [name for profile in own for name in (f"batch {profile.batch_size}, us", "%")]
    rows: list[list[str | float | int]] = []
    for phase in own[0].phases_us:
        row: list[str | float | int] = [phase]
        for profile in own:
            phase_us = profile.phases_us[phase]
            row += [phase_us, f"{100 * phase_us / profile.total_us:.1f}"]
        rows.append(row)
    rows.append(["step", *(cell for profile in own for cell in (profile.total_us, ""))])
    rows.append(["steps", *(cell for profile in own for cell in (profile.num_steps, ""))])
    return Table(f"A {kind} step", ("", *columns), rows, "Medians.")


def _panel(kind: str, profiles: Sequence["StepProfile"]) -> Panel:
    own = _of_kind(kind, profiles)
    series = []
    for phase in own[0].phases_us:
        # A logarithmic scale cannot show phases that are part of another one.
        taken = [(profile.batch_size, us) for profile in own if (us := profile.phases_us[phase])]
        if taken:
            sizes, times_us = zip(*taken, strict=True)
            series.append(Series(phase, sizes, times_us, "marked"))
    return Panel(f"A {kind} step", "batch size", "microseconds", series, y_scale="log")
