"""Anthropic's tool runner."""

import anthropic

from tests.support.frameworks import cases
from tests.support.frameworks.cases import QUESTION, Report, Server, report_of, run


@anthropic.beta_tool
def weather(city: str) -> str:
    """Returns the weather of a city.

    Args:
        city: The city's name.
    """
    return cases.weather(city)


def run_tools(server: Server, **fields):
    """The tool runner's last message, whole or streamed."""
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model=server.model,
        max_tokens=server.max_tokens,
        max_iterations=3,
        tools=[weather],
        messages=[{"role": "user", "content": QUESTION}],
        **fields,
    )
    if not fields.get("stream"):
        return runner.until_done()
    return [turn.get_final_message() for turn in runner][-1]


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def with_a_form(server: Server):
    message = run_tools(server, output_format=Report)
    return report_of(message.parsed_output)


if __name__ == "__main__":
    run(
        {
            "tools": lambda server: text_of(run_tools(server)),
            "streamed tools": lambda server: text_of(run_tools(server, stream=True)),
            "tools and a form": with_a_form,
        },
        (ValueError,),
    )
