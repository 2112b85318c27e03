"""OpenAI's client: a completion, a stream, a tool call, an answer under a schema, a response.

    baton serve                                       # or `make run`, in another terminal
    python examples/openai_client.py [URL [MODEL]]

The demo model writes text of the right form that makes little sense.
"""

import sys
from typing import Literal

from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionUserMessageParam
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo", "Lima"]
    unit: Literal["C", "F"]


def main(url: str = "http://127.0.0.1:8000", model: str = "demo") -> None:
    """Asks in each way and prints the answers."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    question: list[ChatCompletionUserMessageParam] = [
        {"role": "user", "content": "How is the weather in Rome?"}
    ]

    completion = client.completions.create(model=model, prompt="Open the file", max_tokens=16)
    print("completion:", repr(completion.choices[0].text))

    chat = client.chat.completions
    print("stream: ", end="")
    for chunk in chat.create(model=model, messages=question, max_tokens=16, stream=True):
        print(repr(chunk.choices[0].delta.content or ""), end=" ", flush=True)
    print()

    # Without tool_choice the model decides; the server then needs --tool-call-parser.
    called = chat.parse(
        model=model,
        messages=question,
        tools=[pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    for call in called.choices[0].message.tool_calls or ():
        print("call:", call.function.name, call.function.parsed_arguments)

    # Names of vLLM's server go to `extra_body`.
    chosen = chat.create(
        model=model,
        messages=question,
        extra_body={"structured_outputs": {"choice": ["sunny", "rainy"]}},
    )
    print("choice:", chosen.choices[0].message.content)

    response = client.responses.create(model=model, input="Return the", max_output_tokens=16)
    print("response:", repr(response.output_text))


if __name__ == "__main__":
    main(*sys.argv[1:])
