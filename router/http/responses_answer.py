"""Answers of OpenAI's Responses API: the response object and the events of its stream."""

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from baton.common.request.answer import CandidateOutput, TokenCounts
from router.http.answer_parts import (
    AnswerParts,
    LogprobsOf,
    Part,
    PartAdded,
    PartClosed,
    PartKind,
    PartOpened,
    Step,
)
from router.http.custom_input import CustomInput, input_of
from router.http.errors import Problem
from router.http.responses_request import ResponsesRequest
from router.http.responses_tools import ClientTool

__all__ = ["Event", "ResponseAnswer", "ResponseStream"]

Event = dict[str, Any]

_ID_PREFIXES = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.TOOL_CALL: "fc"}
_CUSTOM_ID_PREFIX = "ctc"
_STATUSES = {None: "in_progress", "length": "incomplete", "abort": "failed"}
_ABORTED = {"code": "server_error", "message": "the request was aborted; retry it"}
_CUSTOM_INPUT = "response.custom_tool_call_input"
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseAnswer:
    """The response object of one request.

    Args:
        request: the request.
        model: the name of the model, as the answer states it.
        logprobs_of: makes log-probabilities; used if the request asks for them.
        new_id: makes an id that begins with a prefix.
        now: the time in seconds since 1970.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        logprobs_of: LogprobsOf | None = None,
        new_id: Callable[[str], str] = _new_id,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.parts = AnswerParts(logprobs_of if request.includes_logprobs else None)
        self._request, self._model = request, model
        self._new_id, self._now = new_id, now
        self._id, self._created_at = new_id("resp"), int(now())
        self._item_ids: list[str] = []
        self._error: dict[str, str] | None = None

    def push(self, output: CandidateOutput) -> list[Step]:
        """Adds an output; returns what it changes."""
        return self.parts.push(output)

    def finish(self) -> list[Step]:
        """Ends the answer; returns what that changes."""
        if self.parts.finish_reason == "abort":
            self._error = _ABORTED
        return self.parts.finish()

    def fail(self, problem: Problem) -> None:
        """Makes the answer a failed one."""
        code = _ERROR_CODES.get(problem.status, "server_error")
        self._error = {"code": code, "message": problem.message}

    @property
    def status(self) -> str:
        """in_progress, completed, incomplete or failed."""
        if self._error is not None:
            return "failed"
        return _STATUSES.get(self.parts.finish_reason, "completed")

    def body(self) -> dict[str, Any]:
        """The response object as it is now."""
        status, usage = self.status, self.parts.usage
        is_cut = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "completed_at": int(self._now()) if status == "completed" else None,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._model,
            "output": [self.item(part) for part in self.parts.parts],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            **self._request.echo,
            "usage": None if usage is None else _usage(usage),
        }

    def item_id(self, part: Part) -> str:
        """The id of a part's output item."""
        while len(self._item_ids) <= part.index:
            known = self.parts.parts[len(self._item_ids)]
            prefix = _CUSTOM_ID_PREFIX if self.is_custom(known) else _ID_PREFIXES[known.kind]
            self._item_ids.append(self._new_id(prefix))
        return self._item_ids[part.index]

    def is_custom(self, part: Part) -> bool:
        """Whether a part is a call of a custom tool."""
        tool = self._tool(part)
        return tool is not None and tool.is_custom

    def item(self, part: Part) -> dict[str, Any]:
        """The output item of a part that is over, or was when the answer ended."""
        status = "completed" if part.is_complete else "incomplete"
        return self._item(part, status, part.text, [content_of(part)])

    def empty_item(self, part: Part) -> dict[str, Any]:
        """The output item of a part that begins."""
        return self._item(part, "in_progress", "", [])

    def _item(
        self, part: Part, status: str, text: str, content: list[dict[str, Any]]
    ) -> dict[str, Any]:
        item = {"id": self.item_id(part), "status": status}
        if part.call is not None:
            return self._call_item(part, item, text)
        if part.kind is PartKind.REASONING:
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _call_item(self, part: Part, item: dict[str, Any], text: str) -> dict[str, Any]:
        assert part.call is not None
        tool = self._tool(part)
        call = {"call_id": part.call.id, "name": tool.name if tool else part.call.name}
        if tool is not None and tool.namespace:
            call["namespace"] = tool.namespace
        if self.is_custom(part):  # such items have no status
            return {"type": "custom_tool_call", "id": item["id"], **call, "input": input_of(text)}
        return {"type": "function_call", **item, **call, "arguments": text}

    def _tool(self, part: Part) -> ClientTool | None:
        name = None if part.call is None else part.call.name
        return None if name is None else self._request.tools.get(name)


class ResponseStream:
    """The events of one answer, numbered from 0.

    Args:
        answer: the answer, of which nothing was pushed yet.
    """

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer
        self._num_events = 0
        self._inputs: dict[int, CustomInput] = {}  # of custom calls, by their parts' index

    def push(self, output: CandidateOutput) -> list[Event]:
        """The events of an output."""
        return [*self._start(), *self._events(self._answer.push(output))]

    def finish(self) -> list[Event]:
        """The last events. Called once the outputs have ended."""
        return [*self._start(), *self._events(self._answer.finish()), self._end()]

    def fail(self, problem: Problem) -> list[Event]:
        """The last events of an answer that fails. An item that is not complete stays open."""
        events = self._start()
        self._answer.fail(problem)
        return [*events, self._end()]

    def _start(self) -> list[Event]:
        """The events that come before all others; none the second time."""
        if self._num_events:
            return []
        body = self._answer.body()
        return [
            self._event("response.created", response=body),
            self._event("response.in_progress", response=body),
        ]

    def _end(self) -> Event:
        return self._event(f"response.{self._answer.status}", response=self._answer.body())

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _events(self, steps: list[Step]) -> list[Event]:
        events: list[Event] = []
        for step in steps:
            match step:
                case PartOpened(part):
                    events += self._opened(part)
                case PartAdded(part) if self._answer.is_custom(part):
                    events += self._input_added(part, step.text)
                case PartAdded(part):
                    events.append(self._added(part, step))
                case PartClosed(part):
                    events += self._closed(part)
        return events

    def _opened(self, part: Part) -> list[Event]:
        item = self._answer.empty_item(part)
        events = [self._event("response.output_item.added", output_index=part.index, item=item)]
        if part.call is None:
            empty = content_of(Part(part.kind, part.index))
            place = self._place(part)
            events.append(self._event("response.content_part.added", **place, part=empty))
        return events

    def _added(self, part: Part, step: PartAdded) -> Event:
        place = self._place(part)
        if part.kind is PartKind.TEXT:
            place["logprobs"] = _without_bytes(step.logprobs)
        return self._event(f"{_events_of(part)}.delta", **place, delta=step.text)

    def _input_added(self, part: Part, text: str) -> list[Event]:
        """The event of a custom call's text, if arguments complete some."""
        delta = self._inputs.setdefault(part.index, CustomInput()).push(text)
        return self._input_delta(part, delta)

    def _input_delta(self, part: Part, delta: str) -> list[Event]:
        if not delta:
            return []
        return [self._event(f"{_CUSTOM_INPUT}.delta", **self._place(part), delta=delta)]

    def _input_closed(self, part: Part) -> list[Event]:
        text = input_of(part.text)
        rest = self._inputs.pop(part.index, CustomInput()).rest(text)
        events = self._input_delta(part, rest)
        return [*events, self._event(f"{_CUSTOM_INPUT}.done", **self._place(part), input=text)]

    def _closed(self, part: Part) -> list[Event]:
        place, done = self._place(part), f"{_events_of(part)}.done"
        if self._answer.is_custom(part):
            events = self._input_closed(part)
        elif part.call is not None:
            events = [self._event(done, **place, arguments=part.text)]
        else:
            text: dict[str, Any] = {"text": part.text}
            if part.kind is PartKind.TEXT:
                text["logprobs"] = _without_bytes(part.logprobs)
            events = [
                self._event(done, **place, **text),
                self._event("response.content_part.done", **place, part=content_of(part)),
            ]
        item = self._answer.item(part)
        return [
            *events,
            self._event("response.output_item.done", output_index=part.index, item=item),
        ]

    def _place(self, part: Part) -> dict[str, Any]:
        """The fields that say which content an event is about."""
        place = {"item_id": self._answer.item_id(part), "output_index": part.index}
        return place if part.call is not None else {**place, "content_index": 0}


def content_of(part: Part) -> dict[str, Any]:
    """The content of a message or of reasoning."""
    if part.kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": part.text}
    return {
        "type": "output_text",
        "text": part.text,
        "annotations": [],
        "logprobs": list(part.logprobs),
    }


def _events_of(part: Part) -> str:
    match part.kind:
        case PartKind.REASONING:
            return "response.reasoning_text"
        case PartKind.TEXT:
            return "response.output_text"
        case PartKind.TOOL_CALL:
            return "response.function_call_arguments"


def _without_bytes(logprobs: Any) -> list[Mapping[str, Any]]:
    """Log-probabilities as events have them: without the bytes of tokens."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]
            ],
        }
        for entry in logprobs
    ]


def _usage(usage: TokenCounts) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
