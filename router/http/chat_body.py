"""`ChatBody`: the body of `/v1/chat/completions`."""

from typing import Any

from baton.errors import InvalidArgumentError
from router.chat.conversation import Conversation
from router.chat.messages import conversation_of
from router.http.bodies import Array, JsonObject, SamplingBody
from router.http.params import stated_fields

__all__ = ["ChatBody"]


class ChatBody(SamplingBody):
    """A chat to answer.

    Attributes:
        messages: the chat so far.
        tools: the functions that the model may call.
        tool_choice: none, auto, required, or the function to call.
        max_completion_tokens: the newer name of `max_tokens`.
        logprobs: whether the answer has log-probabilities.
        top_logprobs: how many likeliest tokens are returned at each place.
        reasoning_effort: a variable of the chat template.
        include_reasoning: whether the answer has the reasoning part.
    """

    messages: Array[JsonObject]
    tools: Array[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    documents: Array[JsonObject] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def conversation(self) -> Conversation:
        """The chat, checked.

        Raises:
            InvalidArgumentError: a message, tool or document is malformed; names the part.
        """
        continues = bool(self.continue_final_message)
        begins = self.add_generation_prompt
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return conversation_of(
            self.messages,
            tools=self.tools,
            documents=self.documents,
            add_generation_prompt=not continues if begins is None else begins,
            continue_final_message=continues,
            template_kwargs=variables,
        )

    def stated(self) -> dict[str, Any]:
        """The stated fields of `SamplingParams`.

        Raises:
            InvalidArgumentError: a field is set that chats do not have, or without another one
                that it needs.
        """
        stated = stated_fields(self)
        if self.prompt_logprobs is not None:
            raise InvalidArgumentError("prompt_logprobs is set; only completions return them")
        if self.max_completion_tokens is not None:
            stated["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            stated["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidArgumentError("top_logprobs is set without logprobs; set both")
        return stated
