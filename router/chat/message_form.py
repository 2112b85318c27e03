"""The forms of messages that a template reads, and prompts that end with the last message.

Some templates write `message.content` as it is, others loop over its parts. As in vLLM, a template
that has a loop over the content of a message gets parts, and any other gets text. The results of
tools are always text. GLM-4's template reads them in a role of its own.

Templates agree less on tool calls. Most write `arguments` as JSON, so they get objects, as in
vLLM; some append them to a text, and some write the calls of a message only if its content is null.
That of gpt-oss refuses a message that has reasoning, content and calls, which its models write. A
template is tried with a call to find its form.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import nodes

from baton.common.errors import InvalidArgumentError
from router.chat.chat_request import content_text

__all__ = [
    "REASONING_FIELDS",
    "FinalMessage",
    "MessageForm",
    "find_form",
    "shape_messages",
    "with_written_calls",
]

_TOOL_ROLES = ("tool", "function")
_PROBED_VALUE = "value-of-an-argument"
_PROBED_RESULT = "result-of-a-function"
_OBSERVATION = "observation"
"""The role that GLM-4's template has for the results of tools."""
_PROBE: tuple[Mapping[str, Any], ...] = (
    {"role": "user", "content": "question"},
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "123456789",  # some templates want nine characters
                "type": "function",
                "function": {"name": "f", "arguments": {"name": _PROBED_VALUE}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "123456789", "name": "f", "content": _PROBED_RESULT},
)
_PROBED_TEXTS = {"content": "text", "reasoning_content": "thought", "thinking": "thought"}
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The names that clients and templates have for the reasoning of an earlier answer."""
_CONTINUE_FIELD = "continue_final_message"
_MARK = "END_OF_FINAL_MESSAGE_TEXT"
"""Written after the final message's text; the prompt is cut there."""
_SPACE = " "
"""Follows the mark: a template that removes it has removed the text's own trailing space, too."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How a template reads messages.

    Attributes:
        as_parts: content is a list of parts; otherwise parts become one text, a line break
            between two of them.
        has_developer: the role "developer" is known; otherwise it becomes "system".
        arguments_as_text: the arguments of tool calls are JSON text; otherwise objects.
        null_beside_calls: a message with tool calls and without text has the content None;
            otherwise it has the empty text or list.
        content_as_reasoning: the text of a message with tool calls is the end of its reasoning,
            since a message with all three, or with a text and calls, cannot be written.
        has_calls: whether the template writes calls; otherwise it leaves them out.
        has_observations: whether it reads the results of tools in the role "observation" only.
    """

    as_parts: bool = False
    has_developer: bool = False
    arguments_as_text: bool = False
    null_beside_calls: bool = False
    content_as_reasoning: bool = False
    has_calls: bool = True
    has_observations: bool = False


def find_form(
    template: nodes.Template, text: str, render: Callable[[Sequence[dict[str, Any]]], str]
) -> MessageForm:
    """Returns the form that a template reads.

    Args:
        template: its parsed form.
        text: its source.
        render: renders messages that have a form, and raises InvalidArgumentError for messages
            that the template cannot render.
    """
    form = MessageForm(as_parts=_reads_parts(template), has_developer="developer" in text)
    if _OBSERVATION in text and not _writes(render, form, {}, _PROBED_RESULT):
        form = replace(form, has_observations=True)
    candidates = [
        replace(form, arguments_as_text=as_text, null_beside_calls=null)
        for null in (False, True)
        for as_text in (False, True)
    ]
    for candidate in candidates:
        if _writes(render, candidate, {}, _PROBED_VALUE):
            has_place = _writes(render, candidate, _PROBED_TEXTS, _PROBED_VALUE)
            return replace(candidate, content_as_reasoning=not has_place)
    return replace(form, has_calls=False)


def _writes(
    render: Callable[[Sequence[dict[str, Any]]], str],
    form: MessageForm,
    texts: Mapping[str, str],
    part: str,
) -> bool:
    """Returns whether a template writes a part of a call, whose message has some texts besides,
    or of the call's result.
    """
    question, call, result = _PROBE
    try:
        return part in render(shape_messages((question, {**call, **texts}, result), form))
    except InvalidArgumentError:
        return False


def _reads_parts(template: nodes.Template) -> bool:
    """Whether a parsed template loops over the parts of a message's content."""
    lists = _aliases(template, "messages")
    loops = list(template.find_all(nodes.For))
    messages = {
        name
        for loop in loops
        if any(_reads(loop.iter, name) for name in lists)
        for name in _target_names(loop.target)
    }
    return any(_reads(loop.iter, name, "content") for loop in loops for name in messages)


def _aliases(template: nodes.Template, variable: str) -> set[str]:
    """`variable` and all variables that it, or a slice of it, is assigned to."""
    assignments = list(template.find_all(nodes.Assign))
    found: set[str] = set()
    new = {variable}
    while new:
        found |= new
        new = {
            name
            for assignment in assignments
            if any(_reads(assignment.node, known) for known in found)
            for name in _target_names(assignment.target)
        } - found
    return found


def _target_names(target: nodes.Node) -> Iterator[str]:
    if isinstance(target, nodes.Name):
        yield target.name


def _reads(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Whether an expression is a variable, or a key of it, perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _reads_name(node.node, variable)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == key) and _reads_name(node.node, variable)
    return False


def _reads_name(node: nodes.Node, variable: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable


def shape_messages(
    messages: Sequence[Mapping[str, Any]], form: MessageForm
) -> list[dict[str, Any]]:
    """Returns messages in the form that a template reads.

    Args:
        messages: messages as in a `Conversation`.
        form: the template's.
    """
    return [_shaped(message, form) for message in messages]


def _shaped(message: Mapping[str, Any], form: MessageForm) -> dict[str, Any]:
    role, calls = message.get("role"), message.get("tool_calls")
    has_calls = bool(role == "assistant" and calls)
    if has_calls and form.content_as_reasoning:
        message = _without_content(message)
    shaped = dict(message)
    if role == "developer" and not form.has_developer:
        shaped["role"] = "system"
    if role in _TOOL_ROLES and form.has_observations:
        shaped["role"] = _OBSERVATION
    as_parts = form.as_parts and role not in _TOOL_ROLES
    content = message.get("content")
    shaped["content"] = _parts_of(content) if as_parts else content_text(content, "\n")
    if has_calls:
        if form.null_beside_calls and not content:
            shaped["content"] = None
        if form.arguments_as_text:
            shaped["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
    return shaped


def _without_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose content is the end of its reasoning."""
    fields = {name: value for name, value in message.items() if name != "content"}
    texts = [next((fields[name] for name in REASONING_FIELDS if fields.get(name)), "")]
    texts.append(content_text(message.get("content"), "\n"))
    reasoning = "\n".join([text for text in texts if text])
    return {**fields, **dict.fromkeys(REASONING_FIELDS, reasoning)} if reasoning else fields


def with_written_calls(
    messages: Sequence[Mapping[str, Any]],
    write: Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str | None],
) -> tuple[Mapping[str, Any], ...]:
    """Returns messages whose calls are text behind their content, for a template without calls.

    Args:
        messages: messages as in a `Conversation`.
        write: returns the text of calls, given by names and arguments; None: it is not known.
    """
    return tuple([_with_written_calls(message, write) for message in messages])


def _with_written_calls(
    message: Mapping[str, Any],
    write: Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str | None],
) -> Mapping[str, Any]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    text = write([(each["name"], each["arguments"]) for each in functions]) if functions else None
    if text is None:
        return message
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": content_text(message.get("content"), "\n") + text}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _parts_of(content: Any) -> list[Any]:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


@dataclass(frozen=True, slots=True)
class FinalMessage:
    """The text that an answer continues. `mark` makes one."""

    text: str

    @classmethod
    def mark(cls, messages: Sequence[dict[str, Any]], template: str) -> "FinalMessage":
        """Writes a mark after the last message's text, or after its last part that has text.

        Args:
            messages: the messages; the last one is changed.
            template: the template's source.

        Raises:
            InvalidArgumentError: there is no text, or the template reads no content.
        """
        if "content" not in template:
            raise InvalidArgumentError(
                f"{_CONTINUE_FIELD} is true, but the chat template reads no content"
            )
        message = messages[-1]
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = content + _MARK + _SPACE
            return cls(content)
        for part in reversed(content or []):
            if isinstance(part, dict) and isinstance(text := part.get("text"), str):
                part["text"] = text + _MARK + _SPACE
                return cls(text)
        raise InvalidArgumentError(f"{_CONTINUE_FIELD} is true, but the final message has no text")

    def cut(self, prompt: str) -> str:
        """Returns the prompt up to the end of the text.

        Raises:
            InvalidArgumentError: the template left the text out, or changed it.
        """
        end = prompt.rfind(_MARK)
        if end < 0 or self.text.strip() not in prompt:
            raise InvalidArgumentError(
                f"{_CONTINUE_FIELD} is true, but the chat template leaves out or changes the text "
                "of the final message"
            )
        is_kept = prompt.startswith(_SPACE, end + len(_MARK))
        return prompt[:end] if is_kept else prompt[:end].rstrip()
