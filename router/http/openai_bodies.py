"""`ChatBody` and `CompletionBody`: the bodies of `/v1/chat/completions` and `/v1/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from baton.common.errors import InvalidArgumentError
from baton.common.request.generation import TextOrTokens
from baton.common.request.sampling_params import MAX_LOGPROBS
from router.chat.chat_request import Conversation
from router.chat.messages import conversation_of
from router.http.bodies import Array, Integer, JsonObject, SamplingBody, TokenIds
from router.http.fields import Fields
from router.http.params import stated_fields
from router.requests.validation import MAX_PROMPTS

__all__ = ["ChatBody", "CompletionBody"]

_ALLOWED = "tool_choice.allowed_tools"


class ChatBody(SamplingBody):
    """A chat to answer.

    Attributes:
        messages: the chat so far.
        tools: the functions that the model may call.
        tool_choice: none, auto, required, the function to call, or `allowed_tools`, which names
            those of the tools that the model may call.
        max_completion_tokens: the newer name of `max_tokens`.
        logprobs: whether the answer has log-probabilities.
        top_logprobs: how many likeliest tokens are returned at each place.
        reasoning_effort: a variable of the chat template; "none" turns reasoning off where the
            template can.
        include_reasoning: whether the answer has the reasoning part.
        prediction: a text that the answer will probably repeat.
    """

    messages: Array[JsonObject]
    tools: Array[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[Integer | None, Field(ge=1, lt=2**32)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    documents: Array[JsonObject] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: JsonObject | None = None

    @property
    def forced_choice(self) -> str | dict[str, Any] | None:
        """The choice among the tools of `conversation`. Its form is checked there."""
        allowed = self._allowed
        return self.tool_choice if allowed is None else allowed.raw.get("mode") or "auto"

    def conversation(self) -> Conversation:
        """The chat, checked.

        Raises:
            InvalidArgumentError: a message, tool or document is malformed, or `allowed_tools`
                is; names the part.
        """
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
        return conversation_of(
            self.messages,
            tools=self._allowed_tools(),
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=variables,
        )

    @property
    def schema_fields(self) -> list[str]:
        """The fields that have the schemas of the tools of `conversation`, for errors."""
        places = {id(tool): place for place, tool in enumerate(self.tools or ())}
        allowed = self._allowed_tools() or ()
        return [f"tools[{places[id(tool)]}].function.parameters" for tool in allowed]

    @property
    def _allowed(self) -> Fields | None:
        """The field `tool_choice.allowed_tools`; None for other choices."""
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return None
        return Fields(Fields(choice, "tool_choice").required("allowed_tools"), _ALLOWED)

    def _allowed_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the choice allows: all of them, unless it names some."""
        allowed, tools = self._allowed, self.tools or []
        if allowed is None:
            return self.tools
        allowed.choice("mode", ("auto", "required"))
        by_name = {name: tool for tool in tools if isinstance(name := _name_of(tool), str)}
        chosen = []
        for tool in allowed.objects("tools"):
            function = Fields(tool.required("function"), tool.path_of("function"))
            name = function.required_text("name")
            if name not in by_name:
                limit = f"the name of one of tools: {', '.join(by_name)}"
                raise InvalidArgumentError.for_field(function.path_of("name"), name, limit)
            chosen.append(by_name[name])
        return chosen

    def stated(self) -> dict[str, Any]:
        """The stated fields of `SamplingParams`.

        Raises:
            InvalidArgumentError: a field is set that chats do not have, or without another one
                that it needs, or the prediction is malformed.
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
        if self.prediction is not None:
            stated["prediction"] = _predicted_text(Fields(self.prediction, "prediction"))
        return stated


def _predicted_text(prediction: Fields) -> str:
    """The text of a prediction, or its parts in one."""
    prediction.required("type")
    prediction.choice("type", ("content",))
    if not isinstance(prediction.required("content"), list):
        return prediction.required_text("content")
    texts = []
    for part in prediction.objects("content"):
        part.required("type")
        part.choice("type", ("text",))
        texts.append(part.required_text("text"))
    return "".join(texts)


def _name_of(tool: Mapping[str, Any]) -> Any:
    """The name of a tool that is not checked yet."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _refuse_many(prompt: Any) -> Any:
    """Refuses too many prompts before each of them is checked."""
    if (
        isinstance(prompt, list)
        and len(prompt) > MAX_PROMPTS
        and not isinstance(prompt[0], int | float)
    ):
        raise PydanticCustomError(
            "too_many_prompts",
            "Field has {length} prompts; at most {most} are allowed",
            {"length": len(prompt), "most": MAX_PROMPTS},
        )
    return prompt


class CompletionBody(SamplingBody):
    """A request for completions.

    Attributes:
        prompt: a text, several texts, token ids, or several lists of them.
        logprobs: how many likeliest tokens are returned at each place, beside the token.
    """

    prompt: Annotated[str | Array[str] | TokenIds | Array[TokenIds], BeforeValidator(_refuse_many)]
    logprobs: Integer | None = None

    def prompts(self) -> list[TextOrTokens]:
        """The prompts, one by one.

        Raises:
            InvalidArgumentError: there is none, or one is empty.
        """
        given: Any = self.prompt
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        prompts: list[TextOrTokens] = [given] if is_one else given
        if not all(prompts) or not prompts:
            raise InvalidArgumentError("prompt is empty; it must have at least 1 token")
        return prompts

    @property
    def is_echo_alone(self) -> bool:
        """Whether the answer is the prompt, without generated text."""
        return bool(self.echo) and self.max_tokens == 0

    def stated(self) -> dict[str, Any]:
        """The stated fields of `SamplingParams`.

        An echo with log-probabilities needs those of the prompt. A candidate has at least one
        token, so an echo alone generates one too.

        Raises:
            InvalidArgumentError: a field is set that this server lacks, or excludes another one.
        """
        stated = stated_fields(self)
        if self.logprobs is not None:
            stated["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                stated["prompt_logprobs"] = self.logprobs
        if self.is_echo_alone:
            stated["max_tokens"] = 1
            stated.pop("min_tokens", None)
        return stated
