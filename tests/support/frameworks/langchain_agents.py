"""LangChain's chat models of OpenAI's and Anthropic's APIs, with a tool and a form together."""

from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import LengthFinishReasonError
from pydantic import ValidationError

from tests.support.frameworks import cases
from tests.support.frameworks.cases import QUESTION, Report, Server, report_of, run

weather = tool(cases.weather)


def model_of(server: Server, api: str):
    if api == "messages":
        return ChatAnthropic(
            base_url=server.url,
            api_key="none",
            model_name=server.model,
            max_tokens=server.max_tokens,
        )
    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=server.model,
        max_completion_tokens=server.max_tokens,
        max_retries=0,
        use_responses_api=api == "responses",
        stream_usage=True,
    )


def joined(chunks):
    chunks = list(chunks)
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def converse(caller, *, streams: bool):
    """The answer after the calls of the tool; at most three turns."""
    messages = [HumanMessage(QUESTION)]
    for _ in range(3):
        answer = joined(caller.stream(messages)) if streams else caller.invoke(messages)
        if not answer.tool_calls:
            break
        results = [
            ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
            for call in answer.tool_calls
        ]
        messages += [answer, *results]
    return answer


def tools(server: Server, api: str, *, streams: bool):
    return converse(model_of(server, api).bind_tools([weather]), streams=streams).text


def with_a_form(server: Server, api: str, *, streams: bool):
    caller = model_of(server, api).bind_tools([weather], response_format=Report, strict=True)
    answer = converse(caller, streams=streams)
    return Report.model_validate_json(answer.text).model_dump()


def form_alone(server: Server, api: str, method: str):
    structured = model_of(server, api).with_structured_output(Report, method=method)
    return report_of(structured.invoke(QUESTION))


def cases_of(api: str):
    calls = {
        f"{api}: tools": lambda server: tools(server, api, streams=False),
        f"{api}: streamed tools": lambda server: tools(server, api, streams=True),
        f"{api}: a form": lambda server: form_alone(server, api, "json_schema"),
        f"{api}: a form as a tool": lambda server: form_alone(server, api, "function_calling"),
    }
    if api != "messages":
        calls[f"{api}: tools and a form"] = lambda server: with_a_form(server, api, streams=False)
        calls[f"{api}: streamed tools and a form"] = lambda server: with_a_form(
            server, api, streams=True
        )
    return calls


if __name__ == "__main__":
    run(
        cases_of("chat") | cases_of("responses") | cases_of("messages"),
        (LengthFinishReasonError, OutputParserException, ValidationError),
    )
