"""LiteLLM: a chat with a tool, whole and streamed.

    pip install litellm
    baton serve                                       # or `make run`, in another terminal
    python examples/litellm_chat.py [URL [MODEL]]

The demo model writes text of the right form that makes little sense.
"""

import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download of prices

import litellm

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo", "Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(url: str = "http://127.0.0.1:8000", model: str = "demo") -> None:
    """Asks for a call, whole and streamed, and for an answer with its result."""
    litellm.suppress_debug_info = True  # it has no prices of this model
    server = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    # Without tool_choice the model decides; the server then needs --tool-call-parser.
    tools = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}

    called = litellm.completion(messages=messages, **tools, **server)
    message = called.choices[0].message
    for call in message.tool_calls:
        print("call:", call.function.name, call.function.arguments)

    chunks = list(litellm.completion(messages=messages, stream=True, **tools, **server))
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    for call in whole.choices[0].message.tool_calls:
        print("streamed call:", call.function.name, call.function.arguments)

    messages.append(message.model_dump(exclude_none=True))
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is sunny."}
    messages.append(result)
    print("answer: ", end="")
    for chunk in litellm.completion(messages=messages, max_tokens=32, stream=True, **server):
        print(repr(chunk.choices[0].delta.content or ""), end=" ", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
