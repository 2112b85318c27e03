"""pydantic-ai, over the chat API and the Responses API. Its model of Anthropic's API needs an older
client than the other scripts.
"""

from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from tests.support.frameworks.cases import QUESTION, Report, Server, report_of, run, weather

OUTPUTS = {
    "tools": str,
    "tools and a form": NativeOutput(Report),
    "tools and a form as a tool": ToolOutput(Report),
    "tools and a form as a wish": PromptedOutput(Report),
}


def model_of(server: Server, api: str):
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(server.model, provider=OpenAIProvider(openai_client=client))


def agent_of(server: Server, api: str, output) -> Agent:
    return Agent(
        model_of(server, api),
        output_type=output,
        instructions="Use the tool.",
        tools=[weather],
        model_settings={"max_tokens": server.max_tokens},
    )


async def whole(agent: Agent):
    limits = UsageLimits(request_limit=4)
    return report_of((await agent.run(QUESTION, usage_limits=limits)).output)


async def streamed(agent: Agent):
    async with agent.run_stream(QUESTION, usage_limits=UsageLimits(request_limit=4)) as result:
        return report_of(await result.get_output())


def cases_of(api: str):
    calls = {}
    for name, output in OUTPUTS.items():
        calls[f"{api}: {name}"] = lambda server, out=output: whole(agent_of(server, api, out))
        calls[f"{api}: streamed {name}"] = lambda server, out=output: streamed(
            agent_of(server, api, out)
        )
    return calls


if __name__ == "__main__":
    run(
        cases_of("chat") | cases_of("responses"),
        (UnexpectedModelBehavior, UsageLimitExceeded),
    )
