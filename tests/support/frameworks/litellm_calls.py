"""LiteLLM, over the chat API, the Responses API and Anthropic's API."""

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download of prices

import litellm
from pydantic import ValidationError

from tests.support.frameworks import cases
from tests.support.frameworks.cases import QUESTION, Report, Server, Weather, run

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns the weather of a city.",
        "parameters": Weather.model_json_schema(),
    },
}


def fields_of(server: Server, api: str):
    common = {"api_key": "none", "max_tokens": server.max_tokens}
    if api == "messages":
        return {"model": f"anthropic/{server.model}", "api_base": server.url, **common}
    name = f"openai/responses/{server.model}" if api == "responses" else f"openai/{server.model}"
    return {"model": name, "api_base": f"{server.url}/v1", **common}


def ask(messages, *, streams: bool, **fields):
    answer = litellm.completion(messages=messages, tools=[WEATHER], stream=streams, **fields)
    if streams:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0].message


def converse(server: Server, api: str, *, streams: bool = False, **fields):
    """The answer after the calls of the tool; at most three turns."""
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(3):
        message = ask(messages, streams=streams, **fields_of(server, api), **fields)
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            arguments = Weather.model_validate_json(call.function.arguments)
            result = cases.weather(arguments.city)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content


def with_a_form(server: Server, api: str, *, streams: bool):
    text = converse(server, api, streams=streams, response_format=Report)
    return Report.model_validate_json(text or "").model_dump()


def cases_of(api: str):
    calls = {
        f"{api}: tools": lambda server: converse(server, api),
        f"{api}: streamed tools": lambda server: converse(server, api, streams=True),
    }
    if api != "messages":
        calls[f"{api}: tools and a form"] = lambda server: with_a_form(server, api, streams=False)
        calls[f"{api}: streamed tools and a form"] = lambda server: with_a_form(
            server, api, streams=True
        )
    return calls


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    run(cases_of("chat") | cases_of("responses") | cases_of("messages"), (ValidationError,))
