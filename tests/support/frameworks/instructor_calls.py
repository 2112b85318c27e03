"""instructor, in the modes for OpenAI's and Anthropic's APIs."""

import anthropic
import instructor
import openai
from instructor import Mode
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import ValidationError

from tests.support.frameworks.cases import QUESTION, Report, Server, report_of, run

CHAT_MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.MD_JSON, Mode.JSON_SCHEMA)
RESPONSES_MODES = (Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS)
MESSAGES_MODES = (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON)
ASKED = [{"role": "user", "content": QUESTION}]


def openai_client(server: Server, mode: Mode):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


def anthropic_client(server: Server, mode: Mode):
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    return instructor.from_anthropic(client, mode=mode)


def create(client, server: Server, **fields):
    return report_of(
        client.create(
            model=server.model, response_model=Report, messages=ASKED, max_retries=1, **fields
        )
    )


def partial(client, server: Server, **fields):
    """The last of the reports that grow as the answer streams."""
    reports = client.create_partial(
        model=server.model, response_model=Report, messages=ASKED, **fields
    )
    return [report.model_dump() for report in reports][-1]


def cases():
    calls = {}
    for mode in CHAT_MODES:
        calls[mode.value] = lambda server, mode=mode: create(
            openai_client(server, mode), server, max_tokens=server.max_tokens
        )
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        calls[f"streamed {mode.value}"] = lambda server, mode=mode: partial(
            openai_client(server, mode), server, max_tokens=server.max_tokens
        )
    for mode in RESPONSES_MODES:
        calls[mode.value] = lambda server, mode=mode: create(openai_client(server, mode), server)
    for mode in MESSAGES_MODES:
        calls[mode.value] = lambda server, mode=mode: create(
            anthropic_client(server, mode), server, max_tokens=server.max_tokens
        )
    return calls


if __name__ == "__main__":
    run(cases(), (IncompleteOutputException, InstructorRetryException, ValidationError))
