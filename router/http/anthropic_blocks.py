"""Blocks of Anthropic's API that are no plain text, as text: documents, search results, references
to tools, and what Anthropic's servers did in earlier turns.
"""

from collections.abc import Callable, Mapping
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.json_text import MAX_JSON_DEPTH, compact_json
from router.http.fields import Fields

__all__ = [
    "SERVER_RESULTS",
    "SERVER_USES",
    "TEXT_BLOCKS",
    "text_of_block",
    "text_of_blocks",
    "text_of_server_result",
    "text_of_server_use",
    "wrong_kind",
]

SERVER_USES = ("server_tool_use", "mcp_tool_use")
"""Calls of tools that a server made within an answer."""
SERVER_RESULTS = (
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_result",
)
"""The results of such calls."""
_OF_FILES = ("image", "document", "container_upload", "browser_state")
_ONLY_TEXT = "of text: Baton's models read and write text"
_UNREADABLE = ("type", "encrypted_content", "encrypted_index", "encrypted_stdout", "cache_control")
"""Fields of results that a model cannot read, or that say nothing to it."""
_MAX_RESULT_BYTES = 2**24


def text_of_blocks(fields: Fields, name: str) -> str:
    """Returns the text of a field that is a text or an array of blocks.

    Raises:
        InvalidArgumentError: it is neither, or a block is of a kind that has no text; names it.
    """
    if isinstance(fields.get(name), str):
        return fields.required_text(name)
    return "\n".join(text_of_block(block) for block in fields.objects(name))


def text_of_block(block: Fields) -> str:
    """Returns the text of a block; errors are those of `text_of_blocks`."""
    kind = block.required_text("type")
    text_of = TEXT_BLOCKS.get(kind)
    if text_of is None:
        raise wrong_kind(block, kind, f"one of {', '.join(TEXT_BLOCKS)}")
    return text_of(block)


def wrong_kind(block: Fields, kind: str, limit: str) -> InvalidArgumentError:
    """The error for a block of a kind that has no place or no text."""
    return InvalidArgumentError.for_field(
        block.path_of("type"), kind, _ONLY_TEXT if kind in _OF_FILES else limit
    )


def text_of_server_use(block: Fields) -> str:
    """A call that a server made. It is no call of the client's tools, which the model may make."""
    tool_input = compact_json(block.path_of("input"), block.get("input") or {})
    return f"[{block.required_text('name')} {tool_input}]"


def text_of_server_result(block: Fields) -> str:
    """The result of such a call: its texts, or the JSON of what a model can read of it."""
    content = block.get("content")
    if isinstance(content, str):
        text = block.required_text("content")
    elif _is_text(content):
        text = text_of_blocks(block, "content")
    else:
        result = {"content": _readable(content, block)}
        text = compact_json(block.path_of("content"), result, _MAX_RESULT_BYTES)
    return f"[result: {text}]"


def _is_text(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(block, Mapping) and block.get("type") == "text" for block in content
    )


def _readable(value: Any, block: Fields, depth: int = 0) -> Any:
    """A result without what a model cannot read.

    Raises:
        InvalidArgumentError: it has an image or a document that is no text, or is too deep.
    """
    path = block.path_of("content")
    if depth > MAX_JSON_DEPTH:
        raise InvalidArgumentError(f"{path} is nested too deeply; at most {MAX_JSON_DEPTH} levels")
    if isinstance(value, Mapping):
        if value.get("type") in ("image", "document"):
            return text_of_block(Fields(value, path))
        return {
            name: _readable(entry, block, depth + 1)
            for name, entry in value.items()
            if name not in _UNREADABLE
        }
    if isinstance(value, list):
        return [_readable(entry, block, depth + 1) for entry in value]
    return value


def _text_of_text(block: Fields) -> str:
    return block.required_text("text")


def _text_of_document(block: Fields) -> str:
    """A document with its title and context; those that are no text are refused."""
    source = Fields(block.required("source"), block.path_of("source"))
    kind = source.required_text("type")
    if kind == "text":
        text = source.required_text("data")
    elif kind == "content":
        source.required("content")
        text = text_of_blocks(source, "content")
    else:
        raise InvalidArgumentError.for_field(
            source.path_of("type"), kind, f"text or content, {_ONLY_TEXT}"
        )
    return _lines(block.text("title"), block.text("context"), text)


def _text_of_search_result(block: Fields) -> str:
    block.required("content")
    source = block.required_text("source")
    return _lines(block.required_text("title"), source, text_of_blocks(block, "content"))


def _text_of_tool_reference(block: Fields) -> str:
    return f"[tool {block.required_text('tool_name')}]"


def _lines(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)


TEXT_BLOCKS: Mapping[str, Callable[[Fields], str]] = {
    "text": _text_of_text,
    "document": _text_of_document,
    "search_result": _text_of_search_result,
    "tool_reference": _text_of_tool_reference,
}
"""Functions that return the text of a block, by the types of blocks that may stand for text."""
