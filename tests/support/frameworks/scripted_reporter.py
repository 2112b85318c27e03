"""A scripted model for agent frameworks: it calls the tool, then reports."""

import json
import re

from baton.v1 import request_pb2
from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from tests.support.answering_decode import AnsweringDecode

__all__ = ["REPORT", "TEXT", "reporter", "reporter_template"]

REPORT = {"city": "Rome", "sky": "sunny"}
TEXT = "It is sunny in Rome."
_TEMPLATE = (
    "{% for t in tools or [] %}[offers {{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def reporter_template() -> ChatTemplate:
    """The template whose prompts the scripted model understands."""
    return ChatTemplate(TemplateSource({"default": TemplateText(_TEMPLATE, "test")}, {}))


def reporter() -> AnsweringDecode:
    """A worker that answers as a good model would."""
    return AnsweringDecode(_answer)


def _answer(prompt: str, spec: request_pb2.RequestSpec) -> str:
    """The text of an answer: a call of the tool, unless its result is there; then a report in the
    form that the request states, or by the tool that takes one.
    """
    form = spec.sampling.structured_outputs
    schema = json.loads(form.json or "{}")
    tools = re.findall(r"\[offers (\w+)\]", prompt)
    must_call = "weather" in tools and "[tool]" not in prompt
    name = "weather" if must_call else next((tool for tool in tools if tool != "weather"), None)
    values = {"city": "Rome"} if name == "weather" else REPORT
    if schema.get("type") == "array":  # a call of any tool is forced
        return json.dumps([{"name": name, "parameters": values}])
    if form.disable_any_whitespace and schema:  # a call of one tool is forced
        names = schema.get("properties", {})
        return json.dumps({key: value for key, value in REPORT.items() if key in names})
    if name is not None:
        call = json.dumps({"name": name, "arguments": values})
        return f"<tool_call>\n{call}\n</tool_call>"
    # A tag may constrain the calls of tools alone.
    has_form = form.json_object or "sky" in f"{form.json}{form.structural_tag}{prompt}"
    return json.dumps(REPORT) if has_form else TEXT
