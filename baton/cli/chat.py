"""`baton chat`: a conversation in the terminal with a model behind OpenAI's HTTP API."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from baton.cli.openai_endpoint import OpenAiEndpoint, add_endpoint_args
from baton.cli.sampling_args import add_sampling_args, sampling_fields_from_args
from baton.cli.terminal import Terminal, format_usage
from baton.common.errors import BatonError

__all__ = ["SINGLE_TEXT_OMITS", "ChatSession", "add_args", "converse", "main"]

SINGLE_TEXT_OMITS = (
    *("n", "best-of", "beam-width", "length-penalty", "early-stopping"),
    *("logprobs", "prompt-logprobs", "detokenize"),
)
"""Sampling flags that mean nothing to a command that prints one text."""
_PROMPT = "> "
_INTRODUCTION = (
    "Talking to {model}. /reset starts over, /exit leaves; Ctrl-C ends an answer, Ctrl-D leaves."
)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "message",
        nargs="?",
        metavar="MESSAGE",
        help="a message to answer, instead of a conversation; - reads it from stdin",
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    add_endpoint_args(parser)
    add_sampling_args(parser, omit=SINGLE_TEXT_OMITS, max_tokens=None)


def main(args: argparse.Namespace) -> int:
    """Talks to a model: reads messages from the terminal and streams the answers.

    With a message, or with stdin from a pipe or a file, it answers once. Reasoning is printed
    dimmed, and only to a terminal. For sampling flags that are not given the server's defaults
    hold.
    """
    terminal = Terminal()
    with OpenAiEndpoint.from_args(args) as endpoint:
        conversation = ChatSession(endpoint, args.system, sampling_fields_from_args(args))
        if args.message == "-" or (args.message is None and not sys.stdin.isatty()):
            conversation.answer(sys.stdin.read(), terminal)
        elif args.message is not None:
            conversation.answer(args.message, terminal)
        else:
            converse(conversation, terminal)
    return 0


@dataclass(slots=True)
class ChatSession:
    """The messages of a conversation, and where answers come from.

    Attributes:
        endpoint: the server.
        system: instructions before the first message; None for none.
        params: fields of each request besides its messages.
        messages: what was said, without the instructions.
    """

    endpoint: OpenAiEndpoint
    system: str | None
    params: Mapping[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, message: str, terminal: Terminal) -> None:
        """Streams the answer to a message; both become part of the conversation.

        An answer that Ctrl-C ends keeps what was printed of it. A message without any answer is
        forgotten.

        Raises:
            BatonError: the server cannot be reached or reports an error.
            KeyboardInterrupt: Ctrl-C ended the answer.
        """
        self.messages.append({"role": "user", "content": message})
        parts: list[str] = []
        try:
            with closing(self._events()) as events:
                _print_answer(events, terminal, parts.append)
        finally:
            if parts:
                self.messages.append({"role": "assistant", "content": "".join(parts)})
            else:
                self.messages.pop()

    def reset(self) -> None:
        """Forgets all messages."""
        self.messages.clear()

    def _events(self) -> Any:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            **self.params,
            "messages": [*system, *self.messages],
            "stream_options": {"include_usage": True},
        }
        return self.endpoint.stream("/chat/completions", body)


def converse(conversation: ChatSession, terminal: Terminal) -> None:
    """Reads messages and prints answers until the end of the input, `/exit`, or Ctrl-C twice.

    Raises:
        BatonError: the first request found no server or no model.
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its editing keys and its history
    terminal.note(_INTRODUCTION.format(model=conversation.endpoint.model))
    while (message := _read_message()) is not None:
        if message == "/reset":
            conversation.reset()
            terminal.note("A new conversation.")
        elif message.startswith("/"):
            terminal.note(f"{message} is unknown; there are /reset and /exit")
        elif message:
            _try_to_answer(conversation, message, terminal)


def _read_message() -> str | None:
    """Returns a message without spaces around it; None at the end. Ctrl-C clears the line."""
    while True:
        try:
            message = input(_PROMPT).strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            continue
        return None if message == "/exit" else message


def _try_to_answer(conversation: ChatSession, message: str, terminal: Terminal) -> None:
    try:
        conversation.answer(message, terminal)
    except KeyboardInterrupt:
        terminal.end_line()
        terminal.note("[cancelled]")
    except BatonError as error:
        terminal.end_line()
        terminal.note(f"error: {error.message}")


def _print_answer(
    events: Iterable[Mapping[str, Any]], terminal: Terminal, keep: Callable[[str], None]
) -> None:
    """Prints a stream of chunks, and the counts of its end; `keep` gets each part of the text."""
    finish_reason, usage = None, None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            finish_reason = choice.get("finish_reason") or finish_reason
            delta = choice.get("delta") or {}
            terminal.write_dimmed(delta.get("reasoning") or delta.get("reasoning_content") or "")
            if text := delta.get("content") or delta.get("refusal"):
                keep(text)
                terminal.write(text)
    terminal.end_line()
    terminal.note(format_usage(finish_reason, usage))
