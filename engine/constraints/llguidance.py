"""The backend llguidance (Microsoft's guidance)."""

import json
from collections.abc import Mapping
from typing import Any

from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.interface import (
    MAX_WHITESPACE,
    Grammar,
    GrammarState,
    RefusedError,
    TooComplexError,
    first_line,
)
from engine.constraints.schema import prepare, subschemas
from engine.constraints.structural_tags import lark_of_tag, tag_with_format
from engine.constraints.vocabulary import Mask, Vocabulary

__all__ = ["LLGuidanceBackend"]

# Without it, a mask allows but one tokenization of forced text, that of the `_TokenTable`.
_OPTIONS = '%llguidance {"no_forcing": true}'
# A state of the lexer takes 1 to 2 kB. All sequences of a grammar share them.
_MAX_LEXER_STATES = 50_000
# What a grammar takes, about, beyond its text. llguidance does not say, and states are added as
# sequences meet them.
_GRAMMAR_BYTES = 4 << 20
_BYTES_PER_SOURCE_BYTE = 50


class LLGuidanceBackend:
    """Compiles with llguidance, which has no form of a compiled grammar but its source.

    Args:
        vocabulary: the model's token table.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._library: Any = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_TokenTable(vocabulary)), n_vocab=vocabulary.size
        )
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )

    def compile(
        self, outputs: StructuredOutputs, max_whitespace: int | None = MAX_WHITESPACE
    ) -> bytes:
        """Returns the source that llguidance compiles, which it has compiled once.

        Raises:
            RefusedError: llguidance refuses the constraint, or it is too complex.
        """
        try:
            source = self._build_source(outputs, _build_options(outputs, max_whitespace)).encode()
        except RefusedError:
            raise
        except Exception as error:  # its converter of GBNF raises several types
            raise RefusedError(first_line(str(error))) from None
        matcher = self._compile(source)
        if matcher.is_error():
            raise RefusedError(first_line(matcher.get_error()))
        return source

    def check(self, schema: Any) -> None:
        """Does nothing for a JSON schema that llguidance enforces as a whole."""
        source = self._schema_source(schema, {"whitespace_flexible": True})
        matcher = self._compile(source.encode())
        if matcher.is_error():
            raise RefusedError(first_line(matcher.get_error()))

    def load(self, data: bytes) -> Grammar:
        """Compiles the source that `compile` returned."""
        return _LLGuidanceGrammar(self._compile(data), len(data))

    def _compile(self, source: bytes) -> Any:
        return self._library.LLMatcher(
            self._tokenizer, source.decode(), log_level=0, limits=self._limits
        )

    def _build_source(self, outputs: StructuredOutputs, options: dict[str, Any]) -> str:
        text, form = getattr(outputs, outputs.form), outputs.form
        if form == "json_object":
            return self._schema_source({"type": "object"}, options)
        if form == "json":
            return self._schema_source(json.loads(text), options)
        if form == "choice":
            literals = [_literal(choice) for choice in text]
            return f"start: {' | '.join(literals)}\n{_OPTIONS}"
        if form == "regex":
            # Classes such as \d are those of ASCII, as in xgrammar.
            return f"start: /{self._library.regex_to_lark(text, 'dws')}/\n{_OPTIONS}"
        if form == "grammar":
            is_gbnf = "::=" in text
            lark = self._library.gbnf_to_lark.gbnf_to_lark(text) if is_gbnf else text
            return f"{lark}\n{_OPTIONS}"
        return self._tag_source(json.loads(text), options)

    def _schema_source(self, schema: Any, options: dict[str, Any]) -> str:
        text = json.dumps(self._schema_with_options(schema, options), ensure_ascii=False)
        return f"start: %json {text}\n{_OPTIONS}"

    def _schema_with_options(self, schema: Any, options: dict[str, Any]) -> dict[str, Any]:
        prepared = prepare(schema) if isinstance(schema, dict) else {"allOf": [schema]}
        for path, node in subschemas(prepared):
            if _may_repeat_counted_keys(node):
                raise RefusedError(f"minProperties at {path}, as keys may repeat")
        # Under this key a schema could turn its own enforcement off.
        return {**prepared, "x-guidance": options}

    def _tag_source(self, tag: dict[str, Any], options: dict[str, Any]) -> str:
        def schema_source(schema: Any) -> str:
            prepared = self._schema_with_options(schema, options)
            return f"%json {json.dumps(prepared, ensure_ascii=False)}"

        return f"{lark_of_tag(tag_with_format(tag)['format'], schema_source)}\n{_OPTIONS}"


def _build_options(outputs: StructuredOutputs, max_whitespace: int | None) -> dict[str, Any]:
    """Returns llguidance's options for the whitespace of a constraint's JSON."""
    if outputs.whitespace_pattern is not None:
        return {"whitespace_flexible": True, "whitespace_pattern": outputs.whitespace_pattern}
    if outputs.disable_any_whitespace or max_whitespace == 0:
        return {"whitespace_flexible": False}
    options: dict[str, Any] = {"whitespace_flexible": True}
    if max_whitespace is not None:
        options["whitespace_pattern"] = rf"[ \n\t\r]{{1,{max_whitespace}}}"
    return options


def _may_repeat_counted_keys(schema: Mapping[str, Any]) -> bool:
    """Whether two properties of one name count as two: required ones cannot repeat."""
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    num_distinct = len(required) + 1 if isinstance(required, list) else 1
    return isinstance(least, int) and least > num_distinct


class _TokenTable:
    """The vocabulary as llguidance reads it. Tokenization of forced text is Baton's own."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = vocabulary.special_tokens
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = list(names)
        self.tokens = [
            names[i].encode() if i in names else text for i, text in enumerate(vocabulary.tokens)
        ]
        self._bytes = {text: i for i, text in enumerate(vocabulary.tokens) if len(text) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        encoded = text.encode() if isinstance(text, str) else text
        return [self._bytes[bytes([byte])] for byte in encoded if bytes([byte]) in self._bytes]


class _LLGuidanceGrammar:
    def __init__(self, matcher: Any, source_bytes: int) -> None:
        self._matcher = matcher
        self.num_bytes = _GRAMMAR_BYTES + _BYTES_PER_SOURCE_BYTE * source_bytes

    def new_state(self) -> GrammarState:
        return _LLGuidanceState(self._matcher.deep_copy())


class _LLGuidanceState:
    """A position in a grammar of llguidance."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill_mask(self, row: Mask) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.get_error().startswith("NoExtension"):
            row.fill(0)  # the vocabulary has no token for what comes next
        else:
            self._check()

    def accept(self, token_id: int) -> bool:
        is_accepted = bool(self._matcher.try_consume_tokens([token_id]))
        self._check()
        return is_accepted

    def is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def fork(self) -> GrammarState:
        return _LLGuidanceState(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise TooComplexError(first_line(self._matcher.get_error()))


def _literal(text: str) -> str:
    """A text as a literal of Lark, which does not take the character DEL as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
