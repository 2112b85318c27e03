"""`baton complete`: one completion over OpenAI's HTTP API, streamed to the terminal."""

import argparse
import sys
from contextlib import closing

from baton.cli.chat import SINGLE_TEXT_OMITS
from baton.cli.openai_endpoint import OpenAiEndpoint, add_endpoint_args
from baton.cli.sampling_args import add_sampling_args, sampling_fields_from_args
from baton.cli.terminal import Terminal, format_usage

__all__ = ["add_args", "main"]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("prompt", metavar="PROMPT", help="the text to complete; - reads stdin")
    add_endpoint_args(parser)
    add_sampling_args(parser, omit=SINGLE_TEXT_OMITS)


def main(args: argparse.Namespace) -> int:
    """Completes a prompt: streams the text to stdout and writes the token counts to stderr."""
    terminal = Terminal()
    body = {
        **sampling_fields_from_args(args),
        "prompt": sys.stdin.read() if args.prompt == "-" else args.prompt,
        "stream_options": {"include_usage": True},
    }
    finish_reason, usage = None, None
    with (
        OpenAiEndpoint.from_args(args) as endpoint,
        closing(endpoint.stream("/completions", body)) as events,
    ):
        for event in events:
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                finish_reason = choice.get("finish_reason") or finish_reason
                terminal.write(choice.get("text") or "")
    terminal.end_line()
    terminal.note(format_usage(finish_reason, usage))
    return 0
