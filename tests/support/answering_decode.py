"""`AnsweringDecode`: a fake decode worker whose answer depends on the prompt."""

from collections.abc import Callable
from copy import copy
from typing import Any

from typing_extensions import override

from baton.v1 import decode_pb2, request_pb2
from tests.support.fake_workers import EOS_TOKEN_ID, FakeDecode
from tests.support.running_router import script_of, tokenizer


class AnsweringDecode(FakeDecode):
    """Answers each prompt by a function. It ignores constraints, as all fake workers do.

    Args:
        answer: makes the text of an answer from that of the prompt and the request.
        info: fields of the worker's description.

    Attributes:
        prompts: the texts of all prompts, in the order of arrival.
    """

    def __init__(self, answer: Callable[[str, request_pb2.RequestSpec], str], **info: Any) -> None:
        super().__init__([EOS_TOKEN_ID], **info)
        self.prompts: list[str] = []
        self._answer = answer

    @override
    def scripted_for(self, start: decode_pb2.StartDecode) -> FakeDecode:
        token_ids = start.spec.prompt_token_ids
        prompt = tokenizer().decode(token_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        twin = copy(self)
        twin.script = [*script_of(self._answer(prompt, start.spec)), EOS_TOKEN_ID]
        return twin
