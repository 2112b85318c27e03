"""LangChain's OpenAI chat model: a chat with a tool, a stream, an answer under a schema.

    pip install langchain-openai
    baton serve                                       # or `make run`, in another terminal
    python examples/langchain_chat.py [URL [MODEL]]

The demo model writes text of the right form that makes little sense.
"""

import sys
from typing import Literal

from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

City = Literal["Rome", "Oslo", "Lima"]


@tool
def weather(city: City) -> str:
    """Returns the weather of a city."""
    return f"It is sunny in {city}."


class Trip(BaseModel):
    """A trip to a city."""

    city: City


def main(url: str = "http://127.0.0.1:8000", model: str = "demo") -> None:
    """Calls the tool that the model chooses, and streams the answer."""
    llm = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        model=model,
        max_completion_tokens=64,
        stream_usage=True,
    )
    # Without tool_choice the model decides; the server then needs --tool-call-parser.
    caller = llm.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    messages: list[AnyMessage] = [HumanMessage("How is the weather in Rome?")]

    called = caller.invoke(messages)
    messages.append(called)
    for call in called.tool_calls:
        print("call:", call["name"], call["args"])
        messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))

    print("answer: ", end="")
    tokens = 0
    for piece in llm.stream(messages):
        print(repr(piece.text), end=" ", flush=True)
        tokens += piece.usage_metadata["output_tokens"] if piece.usage_metadata else 0
    print(f"({tokens} tokens)")

    chunks = list(caller.stream(messages[:1]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    print("streamed call:", [(call["name"], call["args"]) for call in whole.tool_calls])

    print("schema:", llm.with_structured_output(Trip).invoke("Where do we go?"))


if __name__ == "__main__":
    main(*sys.argv[1:])
