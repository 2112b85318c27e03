"""Anthropic's client: a message, a stream, a tool call, the number of a prompt's tokens.

    baton serve                                       # or `make run`, in another terminal
    python examples/anthropic_client.py [URL [MODEL]]

The demo model writes text of the right form that makes little sense.
"""

import sys

from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam

WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo", "Lima"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main(url: str = "http://127.0.0.1:8000", model: str = "demo") -> None:
    """Asks in each way and prints the answers."""
    client = Anthropic(base_url=url, api_key="none")
    question: list[MessageParam] = [{"role": "user", "content": "How is the weather in Rome?"}]

    count = client.messages.count_tokens(model=model, messages=question)
    print("prompt:", count.input_tokens, "tokens")

    message = client.messages.create(model=model, max_tokens=16, messages=question)
    print("message:", [block.text for block in message.content if block.type == "text"])

    print("stream: ", end="")
    with client.messages.stream(model=model, max_tokens=16, messages=question) as stream:
        for text in stream.text_stream:
            print(repr(text), end=" ", flush=True)
    print()

    called = client.messages.create(
        model=model,
        max_tokens=64,
        messages=question,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather"},
    )
    print("call:", [block.input for block in called.content if block.type == "tool_use"])


if __name__ == "__main__":
    main(*sys.argv[1:])
