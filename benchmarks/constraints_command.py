"""`baton bench constraints`: what constrained output costs, and what jump-forward saves."""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from baton.common.errors import ConfigurationError
from benchmarks.machine import in_words, name_machine
from benchmarks.models import RANDOM_MODELS, resolve_model, write_dummy_model
from benchmarks.output import (
    add_number,
    add_numbers,
    add_output_args,
    check_output_args,
    flags_of,
    write_report,
)
from benchmarks.report import Report, Table
from engine.cli_args import add_engine_args, engine_config_from_args

if TYPE_CHECKING:
    from benchmarks.offline.constrained import JumpTimes, MaskTimes
    from engine.config import EngineConfig

__all__ = ["add_args", "main"]

_PARTS = ("masks", "jump-forward")
_EOS_TOKEN_ID = 2
_MASKS_MODEL = "qwen2-0.5b"
_PROMPT = "Describe the order as a JSON object.\n"


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--part", choices=_PARTS, help="measure only this (default: both)")
    parser.add_argument(
        "--model",
        default="llama-100m",
        help="model of the part jump-forward: checkpoint folder or Hugging Face Hub name, or "
        f"random weights made when needed: {', '.join(RANDOM_MODELS)} (default: %(default)s)",
    )
    for flag, numbers, text in (
        ("--vocab-size", [32_768, 131_072], "vocabularies of the part masks"),
        ("--batch-size", [1, 32, 256], "sequences that decode together in the part masks"),
        ("--jump-batch-size", [1, 8], "sequences that decode together in the part jump-forward"),
    ):
        add_numbers(parser, flag, numbers, text)
    add_number(parser, "--num-steps", 24, "decode steps of a batch in the part masks, at most 64")
    add_number(parser, "--repeats", 3, "runs of each batch that count")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="of the part jump-forward (default: %(default)s)",
    )
    add_engine_args(parser, omit=("model", "served_model_name", "kv_connector"))
    add_output_args(parser)


def main(args: argparse.Namespace) -> None:
    """Measures constrained output on engines in this process. Masks: the time that grammars, masks
    and rules take in decode steps of qwen2-0.5b with dummy weights, beside steps of plain requests.
    Jump-forward: objects of eight properties, with tokens that are forced and with a draw for each.
    """
    check_output_args(args)
    for flag, least, most in (("num_steps", 3, 64), ("repeats", 1, 1000)):
        if not least <= getattr(args, flag) <= most:
            name, value = flag.replace("_", "-"), getattr(args, flag)
            raise ConfigurationError(f"--{name} is {value}; it must be in [{least}, {most}]")
    parts = _PARTS if args.part is None else (args.part,)
    config = engine_config_from_args(args, model=args.model)
    config = replace(config, enable_prefix_caching=False)
    masks = list(_measure_masks(args, config)) if "masks" in parts else []
    jumps = list(_measure_jumps(args, config)) if "jump-forward" in parts else []
    machine = name_machine()
    write_report(
        Report(
            title="Constrained output",
            facts={"machine": in_words(machine)},
            tables=[*([_masks_table(masks)] if masks else ()), *_jump_tables(jumps, args.model)],
            panels=[],
            results={
                "machine": machine,
                "flags": flags_of(args),
                "masks": [asdict(each) for each in masks],
                "jump_forward": [asdict(each) for each in jumps],
            },
        ),
        args,
    )


def _measure_masks(args: argparse.Namespace, config: "EngineConfig") -> "Iterator[MaskTimes]":
    from benchmarks.offline.constrained import measure_masks, train_tokenizer
    from benchmarks.offline.offline_engine import OfflineEngine

    for vocab_size in args.vocab_size:
        with tempfile.TemporaryDirectory() as name:
            family, shape = RANDOM_MODELS[_MASKS_MODEL]
            fields = {
                "architectures": [f"{family}ForCausalLM"],
                "model_type": family.lower(),
                "dtype": "bfloat16",
                "eos_token_id": _EOS_TOKEN_ID,
            }
            folder = write_dummy_model(shape | fields | {"vocab_size": vocab_size}, Path(name))
            train_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
            sized = replace(
                config,
                model=str(folder),
                load_format="dummy",
                max_num_seqs=max(args.batch_size),
                max_model_len=128,
            )
            with OfflineEngine(sized) as engine:
                for batch_size in args.batch_size:
                    yield from measure_masks(engine, batch_size, args.num_steps, args.repeats)


def _measure_jumps(args: argparse.Namespace, config: "EngineConfig") -> "Iterator[JumpTimes]":
    from baton.common.model_files.files import open_model_files
    from benchmarks.offline.constrained import measure_jumps, train_tokenizer
    from benchmarks.offline.offline_engine import OfflineEngine

    with tempfile.TemporaryDirectory() as name:
        folder = open_model_files(resolve_model(args.model)).path
        if args.model in RANDOM_MODELS:
            # The tokenizer that random models have uses few of their tokens.
            given, folder = folder, Path(name)
            for path in given.iterdir():
                if not path.name.startswith("tokenizer"):
                    (folder / path.name).symlink_to(path)
            vocab_size = RANDOM_MODELS[args.model][1]["vocab_size"]
            train_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
        prompt = open_model_files(folder).load_tokenizer().encode(_PROMPT).ids
        with OfflineEngine(replace(config, model=str(folder))) as engine:
            for batch_size in args.jump_batch_size:
                yield measure_jumps(engine, prompt, batch_size, args.temperature, args.repeats)


def _masks_table(masks: "Sequence[MaskTimes]") -> Table:
    rows: list[list[str | float | int]] = []
    for plain, *others in (masks[index : index + 3] for index in range(0, len(masks), 3)):
        row: list[str | float | int] = [f"{plain.vocab_size:,}", plain.batch_size]
        row += [plain.execute_ms, plain.commit_ms, plain.step_ms]
        for each in others:
            more = 100 * (each.step_ms / plain.step_ms - 1)
            row += [each.execute_ms, each.commit_ms, each.step_ms, f"{more:.1f}"]
        rows.append(row)
    kinds = [f"{column}, {mark}" for mark in "mr" for column in ("execute", "commit", "step", "+%")]
    return Table(
        f"Decode steps of {_MASKS_MODEL}, ms",
        ("vocabulary", "sequences", "execute", "commit", "step", *kinds),
        rows,
        "Medians. m: with masks; r: with masks and rules, which change logits in execute. Grammars "
        "accept tokens and make masks in commit. +%: the step over a plain one.",
    )


def _jump_tables(jumps: "Sequence[JumpTimes]", model: str) -> list[Table]:
    if not jumps:
        return []
    rows = [
        (
            str(each.batch_size),
            each.num_tokens[0],
            each.num_forced,
            each.num_steps[0],
            *(each.num_tokens[1], each.num_steps[1]),
            *(1e3 * each.jumping_s, 1e3 * each.drawing_s, each.speed_up),
        )
        for each in jumps
    ]
    columns = (
        *("sequences", "tokens", "forced", "steps", "tokens, drawn", "steps, drawn"),
        *("ms/token", "ms/token, drawn", "speed-up"),
    )
    note = "Medians. Drawn: without jump-forward, with a draw for each token."
    return [Table(f"Jump-forward, {model}", columns, rows, note)]
