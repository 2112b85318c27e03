"""`baton generate`: one completion, streamed to the terminal."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

from baton.cli.sampling_args import add_sampling_args, sampling_fields_from_args
from baton.client import Client
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.request.results import CompletionChunk, Logprobs
from baton.common.security.client import ClientTls

__all__ = ["add_args", "format_summary", "main", "print_candidates", "print_stream"]

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("prompt", metavar="PROMPT", help="the text to complete; - reads stdin")
    parser.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="the router's address (default: %(default)s)",
    )
    parser.add_argument(
        "--model-name",
        default="",
        metavar="NAME",
        help="the model's name in requests (default: the served model)",
    )
    parser.add_argument(
        "--model", dest="model_name", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--timeout-s", type=float, metavar="SECONDS", help="deadline of the request"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="key of the router's API; the variable BATON_API_KEY does not show it to other users",
    )
    add_flags(parser, ClientTls, "security")
    add_sampling_args(parser)


def main(args: argparse.Namespace) -> int:
    """Completes a prompt: streams the text to stdout and writes the timings to stderr.

    For sampling flags that are not given the server's defaults hold: those of this list, unless
    the model's generation_config.json states others.
    """
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    params = sampling_fields_from_args(args)
    tls = config_from_args(ClientTls, args).options
    with Client(args.address, model=args.model_name, api_key=args.api_key, **tls) as client:
        chunks = client.stream(prompt, params, timeout_s=args.timeout_s)
        if params.get("n", 1) > 1:
            print_candidates(chunks)
        else:
            print_stream(chunks)
    return 0


def print_stream(chunks: Iterable[CompletionChunk]) -> None:
    """Streams the text of one candidate to stdout, then writes log-probabilities if there are any,
    counts and timings to stderr.
    """
    lines: list[str] = []
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
        lines += _logprob_lines(chunk)
        if chunk.usage is not None:
            print(flush=True)
            print(*lines, format_summary(chunk), sep="\n", file=sys.stderr)


def print_candidates(chunks: Iterable[CompletionChunk]) -> None:
    """Writes each candidate when it has ended, with log-probabilities, if there are any, to stderr;
    then counts and timings to stderr.
    """
    texts: dict[int, str] = defaultdict(str)
    lines: dict[int, list[str]] = defaultdict(list)
    for chunk in chunks:
        texts[chunk.index] += chunk.text
        lines[chunk.index] += _logprob_lines(chunk)
        if chunk.finish_reason is not None:
            print(f"{_heading(chunk)}\n{texts.pop(chunk.index)}", flush=True)
            if own := lines.pop(chunk.index):
                print(*own, sep="\n", file=sys.stderr)
        if chunk.usage is not None:
            print(format_summary(chunk), file=sys.stderr)


def _logprob_lines(chunk: CompletionChunk) -> Iterator[str]:
    """Yields a line per token of the prompt and of the chunk that has log-probabilities."""
    if chunk.prompt_token_ids and chunk.prompt_logprobs:
        for token_id, found in zip(chunk.prompt_token_ids, chunk.prompt_logprobs, strict=True):
            yield _logprob_line("prompt", token_id, found)
    for token_id, found in zip(chunk.token_ids, chunk.logprobs or (), strict=False):
        yield _logprob_line("token", token_id, found)


def _logprob_line(kind: str, token_id: int, found: Logprobs | None) -> str:
    """Formats the id, log-probability and rank of a token, then the likeliest tokens there."""
    if found is None:
        return f"{kind} {token_id:>7}"
    own = found[token_id]
    line = f"{kind} {token_id:>7} {own.logprob:10.4f}  rank {own.rank:<6}"
    tops = sorted(found.items(), key=lambda entry: entry[1].rank)
    if len(tops) > 1:
        line += " | " + ", ".join(f"{top_id} {top.logprob:.4f}" for top_id, top in tops)
    return line.rstrip()


def _heading(last: CompletionChunk) -> str:
    score = "" if last.score is None else f", score {last.score:.4f}"
    return f"--- candidate {last.index}: {last.finish_reason}{score}"


def format_summary(last: CompletionChunk) -> str:
    """Formats the token counts and timings of a stream's last chunk in one line."""
    usage, timings = last.usage, last.timings
    assert usage is not None
    assert timings is not None
    stages = ("route", "queue", "prefill", "transfer", "load", "first_token", "decode", "total")
    figures = " | ".join(
        f"{stage.replace('_', ' ')} {getattr(timings, f'{stage}_ms'):.1f}" for stage in stages
    )
    return (
        f"[{last.finish_reason}; tokens: {usage.prompt_tokens} prompt, "
        f"{usage.cached_tokens} cached, {usage.completion_tokens} generated; ms: {figures}]"
    )
