"""`baton bench speculation`: what draft tokens save, and what checking them costs."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count, islice
from typing import TYPE_CHECKING

from tqdm import tqdm

from benchmarks.models import RANDOM_MODELS, resolve_model
from benchmarks.output import (
    add_number,
    add_numbers,
    add_output_args,
    check_output_args,
    report_of_run,
    write_report,
)
from benchmarks.report import Table
from benchmarks.workloads.kind import refuse_below
from engine.cli_args import add_engine_args, engine_config_from_args
from engine.speculative_config import DRAFT_MODEL, LOOKUP_METHODS, MODEL_METHODS, SpeculativeConfig

if TYPE_CHECKING:
    from benchmarks.offline.speculation import DraftComparison, DraftEngine, RowTimes
    from benchmarks.offline.speculation_prompts import PromptMaker

__all__ = ["add_args", "main"]

_ROW_BATCH_SIZES = (1, 8)
_OWN_FIELDS = ("model", "max_num_seqs", "enable_prefix_caching", "speculative_config")
"""Fields of the engines' config that this command sets itself."""
_NO_FIELDS = (
    *("served_model_name", "kv_connector", "tensor_parallel_size", "pipeline_parallel_size"),
    *("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port"),
)
"""Fields that keep their defaults: the engines answer no other process, and have one rank."""


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model",
        default="smollm2",
        help="checkpoint folder, GGUF file, demo, smollm2 or Hugging Face Hub name, or random "
        f"weights made when needed: {', '.join(RANDOM_MODELS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--method",
        nargs="*",
        choices=LOOKUP_METHODS,
        default=list(LOOKUP_METHODS),
        help=f"methods of looking draft tokens up (default: {' '.join(LOOKUP_METHODS)})",
    )
    parser.add_argument(
        "--draft-model",
        nargs="+",
        default=[],
        metavar="[METHOD=]MODEL",
        help="smaller models with the same tokenizer, or heads for the model "
        f"({', '.join(MODEL_METHODS[1:])}), whose draft tokens are measured too",
    )
    add_numbers(parser, "--batch-size", [1, 8, 32], "the most requests at once; each is measured")
    add_number(parser, "--max-tokens", 128, "the most tokens of an answer")
    add_number(parser, "--rounds", 3, "rounds that count")
    add_number(
        parser, "--num-speculative-tokens", 8, "the most draft tokens of a sequence in one step"
    )
    add_engine_args(parser, omit=(*_OWN_FIELDS, *_NO_FIELDS))
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Measures draft tokens on engines in this process: two workloads of prompts with each
    method and without drafts, in alternating rounds; and steps of several known tokens per row.
    All answers must be equal. If some are not, their row has no figures, and the exit status is 1.
    """
    check_output_args(args)
    least = min(args.batch_size)
    refuse_below(1, batch_size=least, max_tokens=args.max_tokens, rounds=args.rounds)
    methods = list(_methods(args))
    config = engine_config_from_args(args, model=resolve_model(args.model))
    config = replace(config, max_num_seqs=max(*args.batch_size, *_ROW_BATCH_SIZES))

    from benchmarks.offline.speculation import open_engines, time_rows
    from benchmarks.offline.speculation_prompts import PromptMaker

    prompts = PromptMaker(config.model)
    with open_engines(config, methods) as engines:
        rows = [time_rows(engines[-1], batch_size) for batch_size in _ROW_BATCH_SIZES]
        comparisons = list(_compare_all(args, engines, prompts))
    report = report_of_run(
        args,
        f"Speculation on {config.model_name}",
        [_comparisons_table(comparisons), _rows_table(rows)],
        facts={"prompts": "chats" if prompts.makes_chats else "plain texts"},
        workloads=[asdict(each) for each in comparisons],
        rows=[asdict(each) for each in rows],
    )
    write_report(report, args)
    return int(any(each.num_differing for each in comparisons))


def _methods(args: argparse.Namespace) -> Iterator[SpeculativeConfig]:
    """Yields the methods to measure."""
    num_tokens = args.num_speculative_tokens
    for method in dict.fromkeys(args.method):
        yield SpeculativeConfig(method=method, num_speculative_tokens=num_tokens)
    for text in args.draft_model:
        method, _, model = text.rpartition("=")
        yield SpeculativeConfig(
            method=method or DRAFT_MODEL,
            model=resolve_model(model),
            num_speculative_tokens=num_tokens,
        )


def _compare_all(
    args: argparse.Namespace, engines: "Sequence[DraftEngine]", prompts: "PromptMaker"
) -> "Iterator[DraftComparison]":
    from benchmarks.offline.speculation import compare_methods
    from benchmarks.offline.speculation_prompts import NUM_TEMPLATES, WORKLOADS

    numbers = count()  # no round repeats a prompt, as "suffix" would find its answer again
    cases = [(workload, size) for workload in WORKLOADS for size in args.batch_size]
    for workload, batch_size in tqdm(cases, unit="case", disable=None):
        rounds = [
            [prompts.make(workload, n) for n in islice(numbers, max(batch_size, NUM_TEMPLATES))]
            for _ in range(args.rounds + 1)
        ]
        yield from compare_methods(engines, workload, batch_size, rounds, args.max_tokens)


def _comparisons_table(comparisons: "Sequence[DraftComparison]") -> Table:
    return Table(
        "Workloads, tokens/s",
        (
            *("workload", "batch", "method", "without", "with", "ratio", "least", "most"),
            *("accepted", "tokens/step", "answers"),
        ),
        [_comparison_row(each) for each in comparisons],
        "Medians of the rounds; ratio: with drafts over without, by round. Accepted: share of the "
        "draft tokens that were right. Tokens/step: of one sequence.",
    )


def _comparison_row(each: "DraftComparison") -> list[str | float | int | None]:
    name: list[str | float | int | None] = [each.workload, each.batch_size, each.method]
    if each.num_differing:
        return [*name, *[None] * 7, f"{each.num_differing} differ"]
    share = f"{each.num_accepted / each.num_drafts:.0%}" if each.num_drafts else None
    return [
        *name,
        each.tokens_per_s_without,
        each.tokens_per_s_with,
        each.ratio,
        min(each.ratios),
        max(each.ratios),
        share,
        each.tokens_per_step,
        "equal",
    ]


def _rows_table(rows: "Sequence[RowTimes]") -> Table:
    numbers = list(rows[0].known_ms)
    return Table(
        "Steps of known tokens",
        ("rows", "context", "decode, ms", "1 token, ms", *(f"{n} tokens" for n in numbers[1:])),
        [
            (
                str(row.batch_size),
                row.context,
                row.decode_ms,
                row.known_ms[1],
                *(row.known_ms[number] / row.known_ms[1] for number in numbers[1:]),
            )
            for row in rows
        ],
        "Medians. Decode: the step of rows without drafts. From 2 tokens on: times the step of 1 "
        "token; all but a row's first token are draft tokens.",
    )
