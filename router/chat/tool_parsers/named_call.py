"""`NamedCallParser`: an answer that is the arguments of a call whose function is known."""

from router.chat.text_input import Steps
from router.chat.tool_parsers.base import GeneratorToolParser

__all__ = ["NamedCallParser"]


class NamedCallParser(GeneratorToolParser):
    """Makes the whole text the arguments of one call.

    A `tool_choice` that names a function forces a text of this form, for every model.

    Args:
        name: the function's.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def read(self) -> Steps[None]:
        """Reads the text."""
        text = self.text
        yield from text.skip_whitespace()
        if (yield from text.peek()):
            self.answer.start_call(self._name)
            yield from text.copy_rest(self.answer.arguments)
