"""openai-agents, over the chat API and over the Responses API."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

from tests.support.frameworks import cases
from tests.support.frameworks.cases import QUESTION, Report, Server, report_of, run

APIS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
weather = function_tool(cases.weather)


def agent_of(server: Server, api: str, **options) -> Agent:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return Agent(
        name="Reporter",
        instructions="Use the tool.",
        model=APIS[api](model=server.model, openai_client=client),
        model_settings=ModelSettings(max_tokens=server.max_tokens, **options.pop("settings", {})),
        tools=[weather],
        **options,
    )


async def whole(agent: Agent):
    return report_of((await Runner.run(agent, QUESTION, max_turns=3)).final_output)


async def streamed(agent: Agent):
    result = Runner.run_streamed(agent, QUESTION, max_turns=3)
    async for _ in result.stream_events():
        pass
    return report_of(result.final_output)


def cases_of(api: str):
    return {
        f"{api}: tools": lambda server: whole(agent_of(server, api)),
        f"{api}: streamed tools": lambda server: streamed(agent_of(server, api)),
        f"{api}: tools and a form": lambda server: whole(agent_of(server, api, output_type=Report)),
        f"{api}: streamed tools and a form": lambda server: streamed(
            agent_of(server, api, output_type=Report)
        ),
        f"{api}: a forced call and a form": lambda server: whole(
            agent_of(server, api, output_type=Report, settings={"tool_choice": "required"})
        ),
    }


if __name__ == "__main__":
    set_tracing_disabled(True)
    run(cases_of("chat") | cases_of("responses"), (AgentsException,))
