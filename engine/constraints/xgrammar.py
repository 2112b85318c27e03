"""The backend xgrammar (Dong et al. 2024, "XGrammar")."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.interface import (
    MAX_COMPILER_THREADS,
    MAX_WHITESPACE,
    Grammar,
    GrammarState,
    RefusedError,
    first_line,
)
from engine.constraints.schema import change_children, prepare, subschemas
from engine.constraints.structural_tags import (
    schemas_of_tag,
    tag_with_format,
    tag_with_whitespace,
)
from engine.constraints.vocabulary import Mask, Vocabulary
from engine.constraints.xgrammar_rules import endless_rule, regex_refusal, schema_refusal

__all__ = ["XGrammarBackend", "endless_rule_of"]

_T = TypeVar("_T")
_CONTENT_OF_OBJECTS = {"properties", "additionalProperties", "unevaluatedProperties"}
_CONTENT_OF_ARRAYS = {"items", "prefixItems", "unevaluatedItems"}
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+: (?:Warning: )?")


class XGrammarBackend:
    """Compiles with xgrammar.

    xgrammar leaves out some of what it does not support, with a warning or without. What
    `engine.constraints.xgrammar_rules` does not know as enforced is refused before, and a warning
    is a refusal.

    Args:
        vocabulary: the model's token table.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._library: Any = xgrammar
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(
            self._info, max_threads=MAX_COMPILER_THREADS, cache_enabled=False
        )

    def compile(
        self, outputs: StructuredOutputs, max_whitespace: int | None = MAX_WHITESPACE
    ) -> bytes:
        """Returns the serialized grammar. Not safe to call from two threads: it reads stderr.

        Raises:
            RefusedError: xgrammar does not enforce all of the constraint.
        """
        if outputs.whitespace_pattern is not None:
            raise RefusedError("whitespace_pattern")
        source = self._prepare(outputs, max_whitespace)
        return _refuse_warnings(lambda: str(source().serialize_json()).encode())

    def check(self, schema: Any) -> None:
        """Does nothing for a JSON schema that xgrammar enforces as a whole."""
        text = _checked(schema)
        _refuse_warnings(lambda: self._library.Grammar.from_json_schema(text))

    def load(self, data: bytes) -> Grammar:
        """Returns the grammar that `compile` serialized."""
        compiled = self._library.CompiledGrammar.deserialize_json(data.decode(), self._info)
        return _XGrammar(self._library, compiled)

    def _prepare(self, outputs: StructuredOutputs, max_whitespace: int | None) -> Callable[[], Any]:
        """Returns the call that compiles the constraint; refuses what it would not enforce."""
        compiler, text = self._compiler, getattr(outputs, outputs.form)
        if outputs.form in ("json", "json_object"):
            schema = _checked(json.loads(text)) if outputs.form == "json" else '{"type":"object"}'
            is_compact = outputs.disable_any_whitespace or max_whitespace == 0
            return lambda: compiler.compile_json_schema(
                schema,
                any_whitespace=not is_compact,
                separators=(",", ":"),
                max_whitespace_cnt=None if is_compact else max_whitespace,
            )
        if outputs.form == "structural_tag":
            if outputs.disable_any_whitespace:
                raise RefusedError("disable_any_whitespace in a structural tag")
            tag = tag_with_format(json.loads(text))
            for schema in schemas_of_tag(tag):
                _checked(schema)
            if max_whitespace is not None:
                tag = tag_with_whitespace(tag, max(1, max_whitespace))  # it takes no 0
            return lambda: compiler.compile_structural_tag(json.dumps(tag))
        if outputs.form == "regex":
            if (refusal := regex_refusal(text)) is not None:
                raise RefusedError(refusal)
            return lambda: compiler.compile_regex(text)
        if outputs.form == "choice":
            rule = " | ".join(map(_literal, text))
            return lambda: compiler.compile_grammar(f"root ::= {rule}")
        if "::=" in text:
            return lambda: compiler.compile_grammar(text)
        return lambda: compiler.compile_lark(text)


def endless_rule_of(grammar: str) -> str | None:
    """Returns a rule because of which a grammar has no finite text; None if there is none,
    or if xgrammar cannot read the grammar.
    """
    import xgrammar

    read = xgrammar.Grammar.from_ebnf if "::=" in grammar else xgrammar.Grammar.from_lark
    with _native_warnings():
        try:
            ebnf = str(read(grammar))
        except Exception:  # its parsers raise several types
            return None
    return endless_rule(ebnf)


class _XGrammar:
    def __init__(self, library: Any, compiled: Any) -> None:
        self._library = library
        self._compiled = compiled
        self.num_bytes = int(compiled.memory_size_bytes)

    def new_state(self) -> GrammarState:
        return _XGrammarState(self._library.GrammarMatcher(self._compiled))


class _XGrammarState:
    """A position in a grammar of xgrammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill_mask(self, row: Mask) -> None:
        if not self._matcher.fill_next_token_bitmask(row.reshape(1, -1)):
            row.fill(-1)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def is_complete(self) -> bool:
        return bool(self._matcher.is_completed())

    def fork(self) -> GrammarState:
        return _XGrammarState(self._matcher.fork())


def _checked(schema: Any) -> str:
    """Returns a schema's text; refuses what xgrammar would not enforce."""
    prepared = prepare(schema)
    for path, node in subschemas(prepared):
        if (refusal := schema_refusal(node)) is not None:
            raise RefusedError(f"{refusal} at {path}")
    return json.dumps(_with_open_kinds(prepared), ensure_ascii=False)


def _with_open_kinds(schema: Any) -> Any:
    """Returns a schema that says which objects and arrays may have anything in them: behind a
    reference, xgrammar takes those that say nothing for empty ones.
    """
    if not isinstance(schema, dict):
        return schema
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or ()
    opened: dict[str, Any] = change_children(schema, _with_open_kinds)
    if "object" in kinds and not schema.keys() & _CONTENT_OF_OBJECTS:
        opened["additionalProperties"] = True
    if "array" in kinds and not schema.keys() & _CONTENT_OF_ARRAYS:
        opened["items"] = True
    return opened


def _refuse_warnings(call: Callable[[], _T]) -> _T:
    """Returns the result of a call of xgrammar, unless it warns or fails.

    Raises:
        RefusedError: has the warning or the error.
    """
    with _native_warnings() as warnings:
        try:
            result = call()
        except Exception as error:  # its parsers raise several types
            raise RefusedError(_reason(str(error))) from None
        if warning := next((line for line in warnings() if "Warning" in line), None):
            raise RefusedError(_reason(warning))
    return result


def _literal(text: str) -> str:
    """A text as a literal of xgrammar's EBNF."""
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char.isprintable() else f"\\U{ord(char):08x}"


@contextmanager
def _native_warnings() -> Iterator[Callable[[], list[str]]]:
    """Collects what native code writes to stderr meanwhile, in lines."""
    collected = os.memfd_create("warnings")
    stderr = os.dup(2)
    try:
        os.dup2(collected, 2)
        yield lambda: _read_all(collected).decode(errors="replace").splitlines()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(collected)


def _read_all(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _reason(message: str) -> str:
    """The first line of a message, without the time and the place in xgrammar's source."""
    if "bad_alloc" in message:
        return "it needs too much memory to compile"
    return first_line(_SOURCE_PLACE.sub("", message.strip()))
