"""LlamaIndex: a chat with a tool, whole and streamed.

    pip install llama-index-llms-openai-like
    baton serve                                       # or `make run`, in another terminal
    python examples/llamaindex_chat.py [URL [MODEL]]

The demo model writes text of the right form that makes little sense.
"""

import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(city: Literal["Rome", "Oslo", "Lima"]) -> str:
    """Returns the weather of a city."""
    return f"It is sunny in {city}."


def main(url: str = "http://127.0.0.1:8000", model: str = "demo") -> None:
    """Asks for a call, whole and streamed, and for an answer with its result."""
    llm = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=64,
    )
    tool = FunctionTool.from_defaults(weather)
    question = ChatMessage(role="user", content="How is the weather in Rome?")
    # Without tool_required the model decides; the server then needs --tool-call-parser.
    asked = {"tools": [tool], "chat_history": [question], "tool_required": True}

    called = llm.chat_with_tools(**asked)
    (call,) = llm.get_tool_calls_from_response(called)
    print("call:", call.tool_name, call.tool_kwargs)

    *_, last = llm.stream_chat_with_tools(**asked)
    (streamed,) = llm.get_tool_calls_from_response(last)
    print("streamed call:", streamed.tool_name, streamed.tool_kwargs)

    result = ChatMessage(
        role="tool",
        content=weather(**call.tool_kwargs),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    print("answer: ", end="")
    for piece in llm.stream_chat([question, called.message, result]):
        print(repr(piece.delta), end=" ", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
