"""`baton bench quality`: next-token distributions of a model's quantized forms, and of engines that
serve them, compared with those of its weights in float32.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from baton.common.machine_limits import affine_cores
from baton.common.model_files.files import open_model_files
from benchmarks.output import (
    add_number,
    add_output_args,
    check_output_args,
    report_of_run,
    write_line,
    write_report,
)
from benchmarks.peers.catalogue import GGUF_FORMS, launch_of
from benchmarks.peers.environments import NotMeasurableError, Setting, add_peer_args
from benchmarks.peers.peer_process import PeerProcess
from benchmarks.peers.served_files import as_quantized_gguf, compared_model
from benchmarks.quality.divergence import Divergence
from benchmarks.quality.sources import BatonSource, LogitsSource, PeerSource
from benchmarks.quality.texts import token_texts
from benchmarks.report import Table
from benchmarks.workloads.kind import refuse_below
from engine.config import QUANTIZED_COMPUTE, EngineConfig

__all__ = ["add_args", "main"]


@dataclass(frozen=True, slots=True)
class _Row:
    """What is compared with the base.

    Attributes:
        form: form of the weights; empty for the model as it is.
        engine: the engine, and how it computes.
        source: its logits.
        divergence: gathers the comparison.
    """

    form: str
    engine: str
    source: LogitsSource
    divergence: Divergence = field(default_factory=Divergence)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model",
        default="smollm2",
        help="checkpoint folder or GGUF file, or the name of one (default: %(default)s)",
    )
    parser.add_argument(
        "--form",
        choices=GGUF_FORMS,
        action="append",
        help="repeatable; quantized by llama.cpp, and served by Baton and by llama.cpp from one "
        "file (default: all)",
    )
    add_number(parser, "--num-texts", 16, "help topics of Python")
    add_number(parser, "--text-tokens", 256, "tokens of each")
    add_peer_args(parser)
    add_output_args(parser)


def main(args: argparse.Namespace) -> None:
    """Compares next-token distributions with those of the model's weights in float32: of Baton in
    bfloat16, of its quantized forms, and of llama.cpp on the same files, all on the same texts.
    """
    check_output_args(args)
    refuse_below(2, num_texts=args.num_texts, text_tokens=args.text_tokens)
    peers_folder = args.peers_folder.expanduser().resolve()
    setting = Setting(
        model=compared_model(args.model, peers_folder / "models"),
        num_threads=args.num_threads or affine_cores(),
        peers_folder=peers_folder,
        max_model_len=args.text_tokens,
    )
    tokenizer = open_model_files(setting.model).load_tokenizer()
    texts = token_texts(tokenizer, args.num_texts, args.text_tokens)
    base = _baton(setting, setting.model, "float32", "exact")
    with ExitStack() as stack:
        rows = list(_rows(setting, args.form or GGUF_FORMS, base.vocab_size, stack))
        for text in tqdm(texts, unit="text", disable=None):
            expected = base.logits(text)
            for row in rows:
                row.divergence.add(expected, row.source.logits(text))
    results = [
        {"form": row.form, "engine": row.engine, **asdict(row.divergence.figures())} for row in rows
    ]
    report = report_of_run(
        args,
        f"Quality of {setting.model.name}",
        [_table(results)],
        facts={"texts": f"{len(texts)} of {args.text_tokens} tokens"},
        rows=results,
    )
    write_report(report, args)


def _rows(
    setting: Setting, forms: Sequence[str], vocab_size: int, stack: ExitStack
) -> Iterator[_Row]:
    """Yields the model as it is and each form, on Baton and then on llama.cpp if it is there."""
    for form in ("", *forms):
        try:
            peer = _start(f"llamacpp-{form}" if form else "llamacpp", setting, stack)
        except NotMeasurableError as error:
            write_line(f"not measured: {error.message}")
            if form:  # llama.cpp makes the file
                continue
            peer = None
        file = as_quantized_gguf(setting, form) if form else setting.model
        for mode in QUANTIZED_COMPUTE:
            yield _Row(form, f"baton, {mode}", _baton(setting, file, "bfloat16", mode))
        if peer is not None:
            yield _Row(form, peer.description, PeerSource(peer, vocab_size))


def _baton(setting: Setting, model: Path, dtype: str, mode: str) -> BatonSource:
    return BatonSource(
        EngineConfig(
            model=str(model),
            dtype=dtype,
            max_model_len=setting.max_model_len,
            num_threads=setting.num_threads,
            device="cpu",
            quantized_compute=mode,
        )
    )


def _start(engine: str, setting: Setting, stack: ExitStack) -> PeerProcess:
    """Starts an engine, waits until it has loaded, and pauses it."""
    peer = stack.enter_context(PeerProcess(launch_of(engine, setting)))
    peer.wait_until_ready()
    peer.pause()
    return peer


def _table(results: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            result["form"] or "as it is",
            result["engine"],
            1000 * result["mean"],
            1000 * result["error"],
            1000 * result["p99"],
            100 * result["agreement"],
        )
        for result in results
    ]
    return Table(
        "Divergence from the weights as they are, computed in float32",
        ("form", "engine", "mean KL, 1e-3 nats", "+-", "p99", "same top token, %"),
        rows,
        "Baton computes in bfloat16; exact, as it is, its divergence is that of rounding to "
        "bfloat16 alone. The error is the standard error over texts.",
    )
