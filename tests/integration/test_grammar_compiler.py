"""Grammars compile beside each other, once each, and hostile ones do not affect other requests."""

import json
import os
import re
import signal
import threading
import time
from contextlib import suppress

import psutil
import pytest

from baton.common.errors import (
    ConfigurationError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints import backends as grammar_backends
from engine.constraints.compiler import CompileLimits, GrammarCompiler
from engine.metrics.counts import EngineMetrics
from tests.support.constraints import vocabulary_of
from tests.support.json_schemas import allowed_tokens, text_of, walk

TIMEOUT_S = 3.0
RESULT_S = 60.0
FINE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module", autouse=True)
def one_compile_process():
    """Each compiler starts its own process."""


def chain(depth, leaf):
    schema = leaf
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(depth, keyword):
    schema = {"type": "integer"}
    for i in range(depth):
        wrapped = {"type": "object", "properties": {f"k{i}": schema}, "required": [f"k{i}"]}
        schema = {keyword: [schema, wrapped]}
    return schema


# Each is refused when it is made, refused or timed out when it is compiled, or compiles within
# its bounds and stays within them while tokens are drawn.
HOSTILE = {
    "deep nesting": {"json": chain(30, {"type": "null"})},
    "deeper than JSON may be": {"json": "[" * 100_000},
    "a reference to itself": {"json": {"$ref": "#"}},
    "references in a circle": {
        "json": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "a required property of its own kind": {
        "json": {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    },
    "a remote reference": {"json": {"$ref": "http://example.com/a.json"}},
    "a missing reference": {"json": {"$ref": "#/$defs/none"}},
    "a huge enum": {"json": {"enum": [f"value {i}" for i in range(12_000)]}},
    "thousands of optional properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    },
    "a huge minItems": {"json": {"type": "array", "items": FINE, "minItems": 10**6}},
    "a huge maxLength": {"json": {"type": "string", "maxLength": 10**9}},
    "a huge minLength": {"json": {"type": "string", "minLength": 10**7}},
    "bounds past 64 bits": {"json": {"type": "integer", "minimum": 10**20}},
    "bounds that exclude each other": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "doubling by anyOf": {"json": doubling(8, "anyOf")},
    "doubling by oneOf": {"json": doubling(8, "oneOf")},
    "a product of alternatives": {
        "json": {
            "allOf": [
                {
                    "anyOf": [
                        {"type": "object", "properties": {f"a{i}": {"const": j}}} for j in range(9)
                    ]
                }
                for i in range(9)
            ]
        }
    },
    "unsupported keywords": {"json": {"type": "array", "uniqueItems": True}},
    "lookahead in a pattern": {"json": {"type": "string", "pattern": "^(?=a)b$"}},
    "an unknown format": {"json": {"type": "string", "format": "bogus"}},
    "an exponential pattern": {"json": {"type": "string", "pattern": "^(a|b)*a(a|b){24}$"}},
    "nested repetitions": {"regex": "(a{1,1000}){1,1000}"},
    "thrice nested repetitions": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "ambiguous repetitions": {"regex": "(a|aa|aaa|a*)*b" + "(x+x+)+y" * 50},
    "an exponential automaton": {"regex": "(a|b)*a(a|b){24}c"},
    "a broken expression": {"regex": "(["},
    "a backreference": {"regex": "(a)\\1"},
    "a long choice": {"choice": ["x" * 200_000, "y"]},
    "thousands of choices": {"choice": [f"option number {i}" for i in range(4000)]},
    "invalid JSON": {"json": '{"type":'},
    "broken EBNF": {"grammar": 'root ::= "a" | other ('},
    "EBNF without its rule": {"grammar": "root ::= other"},
    "endless EBNF": {"grammar": 'root ::= "a" root'},
    "ambiguous EBNF": {"grammar": 'root ::= root root root | "a" | ""'},
    "broken Lark": {"grammar": 'start: "a" | ('},
    "endless Lark": {"grammar": 'start: "a" start'},
    "ambiguous Lark": {"grammar": 'start: start start start | "a" | ""'},
    "left recursion in EBNF": {"grammar": 'root ::= root "a" | root root | "b"'},
    "left recursion through rules": {"grammar": 'root ::= a\na ::= b "x" | "y"\nb ::= a | root'},
    "endless left recursion": {"grammar": 'root ::= root "a"'},
    "left recursion in Lark": {"grammar": 'start: start "a" | start start | "b"'},
    "deep groups in EBNF": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "deep groups in Lark": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "deep groups in an expression": {"regex": "(" * 8_000 + "a" + ")" * 8_000},
    "an EBNF of 256 KiB": {"grammar": "root ::= " + " | ".join(f'"{i:05}"' for i in range(23_000))},
    "a chain of 9,000 rules": {
        "grammar": "root ::= r0\n"
        + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(9_000))
        + '\nr9000 ::= "a" | ""'
    },
    "a schema of 256 KiB": {
        "json": {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "array", "items": {"enum": [i, str(i)]}} for i in range(4_000)
            },
        }
    },
    "a larger schema": {"json": {"enum": ["x" * 300_000]}},
    "a repetition in EBNF": {"grammar": 'root ::= ("a" | "b"){1000000}'},
    "nested repetitions in EBNF": {"grammar": 'root ::= ((("a"{1000}){1000}){1000}){1000}'},
    "a repetition of a million": {"regex": "(ab?){1000000}"},
    "a minItems of a billion": {"json": {"type": "array", "minItems": 10**9}},
    "negative sizes": {"json": {"type": "array", "items": {}, "minItems": 5, "maxItems": -1}},
    "a NUL": {"regex": "a\0b"},
    "a NUL in a schema": {"json": {"type": "string", "pattern": "^a\0$"}},
    "a lone surrogate": {"choice": ["a\ud800"]},
    "a lone surrogate in a schema": {"json": '{"const": "\\ud800"}'},
    "classes of all of Unicode": {"regex": r"(\p{L}|\p{N}|[^\x00-\x7f]|\W){1,400}"},
    "negated classes": {"regex": "([^a][^b][^c]|[^abc]+){1,300}(日|[^日])*"},
    "backtracking": {"regex": "(a*)*(a*)*(a*)*(a*)*(a*)*b|((x+)+)+y|(.*.*.*.*=.*)*"},
    "backtracking in a pattern": {"json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]$"}},
    "alternatives of alternatives": {"regex": "((a|b|ab)(c|d|cd)(e|f|ef)){1,500}"},
    "a dictionary of patterns": {
        "json": {
            "type": "object",
            "patternProperties": {f"^({'a|' * i}b)+$": {"type": "integer"} for i in range(40)},
            "additionalProperties": False,
        }
    },
    "whitespace without end": {"json": FINE, "whitespace_pattern": "(( *)*)*"},
    "a tag with numbers for texts": {
        "structural_tag": {"structures": [{"begin": 1, "schema": [], "end": {}}], "triggers": 5}
    },
    "a tag with triggers of nothing": {
        "structural_tag": {
            "structures": [{"begin": "<f>", "schema": FINE, "end": ""}],
            "triggers": [""],
        }
    },
    "a tag of tags": {
        "structural_tag": {
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "or", "elements": []},
                    {"type": "tag", "begin": None, "content": 3, "end": []},
                ],
            }
        }
    },
    "an unknown structural tag": {"structural_tag": {"format": {"type": "bogus"}}},
    "triggered tags without triggers": {
        "structural_tag": {
            "format": {
                "type": "triggered_tags",
                "tags": [
                    {"begin": "<f>", "content": {"type": "json_schema", "json_schema": FINE}}
                    | {"type": "tag", "end": "</f>"}
                ],
            }
        }
    },
    "bounds past 64 bits in a tag with structures": {
        "structural_tag": {
            "structures": [
                {"begin": "<f>", "schema": {"type": "integer", "minimum": 10**20}, "end": ""}
            ],
            "triggers": ["<f>"],
        }
    },
    "bounds past 64 bits in a tag with a format": {
        "structural_tag": {
            "format": {
                "type": "tag",
                "begin": "<f>",
                "content": {
                    "type": "json_schema",
                    "json_schema": {"type": "integer", "minimum": 10**20},
                },
                "end": "",
            }
        }
    },
    "an endless schema in a tag with structures": {
        "structural_tag": {
            "structures": [{"begin": "<f>", "schema": {"$ref": "#"}, "end": ""}],
            "triggers": ["<f>"],
        }
    },
    "a structural tag of nothing": {"structural_tag": {}},
}
# These reach the deadline of a compile.
TIMED_OUT = {
    "thousands of optional properties",
    "an EBNF of 256 KiB",
    "a chain of 9,000 rules",
    "a schema of 256 KiB",
}
# They take as long, and differ from others only in the size of a part.
RARELY = {"a chain of 9,000 rules", "a schema of 256 KiB"}
# These must not pass.
REFUSED = {
    "deeper than JSON may be": "is not JSON",
    "a reference to itself": r"json has no finite instance: # requires itself",
    "references in a circle": r"json has no finite instance: #/\$defs/\w requires itself",
    "a required property of its own kind": "json has no finite instance",
    "a remote reference": r"json is not supported: \$ref at # \(xgrammar\); .*example\.com",
    "a missing reference": "json is not supported",
    "bounds past 64 bits": "json has a minimum past 64 bits at #",
    "bounds that exclude each other": "json is not supported: .*minimum",
    "unsupported keywords": r"json is not supported: uniqueItems at # \(xgrammar\); .*uniqueItems",
    "lookahead in a pattern": "json is not supported: pattern",
    "a broken expression": "regex is not supported",
    "a backreference": "regex is not supported",
    "invalid JSON": "json is not JSON",
    "broken EBNF": "grammar is not supported",
    "EBNF without its rule": "grammar is not supported",
    "broken Lark": "grammar is not supported",
    "endless EBNF": "grammar has no finite text: the rule root has none",
    "endless Lark": "grammar has no finite text: the rule root has none",
    "endless left recursion": "grammar has no finite text: the rule root has none",
    "a larger schema": r"json has 3\d+ bytes of UTF-8; at most 262144",
    "negative sizes": "json is not supported",
    "a NUL": "regex contains a NUL character",
    "a lone surrogate": "choice is not valid Unicode: lone surrogate at character 1",
    "a lone surrogate in a schema": "json is not valid Unicode",
    "a tag with numbers for texts": "structural_tag is not supported",
    "a tag of tags": "structural_tag is not supported",
    "an unknown structural tag": "structural_tag is not supported: .*bogus",
    "a structural tag of nothing": "structural_tag is not supported: it has neither format",
    "triggered tags without triggers": "triggered_tags needs a list of triggers",
    "bounds past 64 bits in a tag with structures": "has a minimum past 64 bits at #",
    "bounds past 64 bits in a tag with a format": "has a minimum past 64 bits at #",
    "an endless schema in a tag with structures": "structural_tag has no finite instance: #",
}


def load_vocabulary():
    return vocabulary_of("byte_level")


@pytest.fixture(scope="module")
def compiler():
    limits = CompileLimits(timeout_s=TIMEOUT_S, num_workers=2)
    compiler = GrammarCompiler(load_vocabulary, limits=limits)
    for outputs in (StructuredOutputs(json=FINE), StructuredOutputs(grammar='start: "a"')):
        compiler.compile(outputs).result(RESULT_S)  # loads xgrammar, then llguidance
    yield compiler
    compiler.close()


def new_compiler(**limits):
    """A compiler that starts quickly: xgrammar imports torch."""
    return GrammarCompiler(load_vocabulary, backend="llguidance", limits=CompileLimits(**limits))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "hostile",
    [pytest.param(name, marks=pytest.mark.slow if name in RARELY else ()) for name in HOSTILE],
)
def test_a_hostile_constraint_is_bounded_and_delays_no_other(compiler, hostile):
    harmless = StructuredOutputs(regex=f"[a-c]+{len(hostile)}{hostile[:9]}")
    is_timed = hostile in TIMED_OUT
    started = time.monotonic()
    error = None
    try:
        future = compiler.compile(StructuredOutputs(**HOSTILE[hostile]))
        beside = compiler.compile(harmless)
        beside.result(RESULT_S)
        assert not is_timed or not future.done(), "it has waited for the other"
        constraint = future.result(RESULT_S)
    except InvalidArgumentError as raised:
        error = raised
    else:
        draw_many(constraint)
    assert time.monotonic() - started < (10 * TIMEOUT_S if is_timed else RESULT_S)
    if hostile in REFUSED:
        assert error is not None, "it compiled"
        assert re.search(REFUSED[hostile], error.message), error.message
    if error is not None:
        assert error.message.startswith("structured_outputs.")
        assert len(error.message) < 1000


def forced_calls(**schemas):
    """The form of calls of tools, by their names."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]
    return StructuredOutputs.of_tools(tools, "required")


@pytest.mark.parametrize(
    "hint",
    [
        "unsupported keywords",
        "a missing reference",
        "a reference to itself",
        "bounds past 64 bits",
    ],
)
def test_a_tool_that_cannot_be_enforced_refuses_no_other(compiler, hint):
    check_calls(compiler, forced_calls(fine=FINE, odd=HOSTILE[hint]["json"]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "llguidance"])  # the second one refuses it soon
def test_a_tool_that_is_too_complex_refuses_no_other(backend):
    compiler = GrammarCompiler(load_vocabulary, backend=backend)
    odd = HOSTILE["thousands of optional properties"]["json"]
    try:
        check_calls(compiler, forced_calls(fine=FINE, odd=odd))
    finally:
        compiler.close()


def check_calls(compiler, outputs):
    """Checks that calls of the tools "fine" and "odd" are accepted if the first one obeys FINE."""
    vocabulary = load_vocabulary()
    for text, is_accepted in (
        ('[{"name":"fine","parameters":{"a":1}}]', True),
        ('[{"name":"fine","parameters":{"a":null}}]', False),
        ('[{"name":"odd","parameters":', True),
    ):
        matcher = compiler.compile(outputs).result(RESULT_S).new_matcher(())
        tokens = [vocabulary.byte_tokens[byte] for byte in text.encode()]
        assert matcher.replay(tokens) == is_accepted


@pytest.mark.slow
def test_compiling_hungry_grammars_leaves_no_memory_behind(compiler):
    """And no process; a grammar that exceeds the limit of memory is refused."""
    server = psutil.Process(compiler._process._process.pid)
    before = server.memory_info().rss
    for i in range(2):
        hungry = StructuredOutputs(json=doubling(8, "anyOf") | {"title": str(i)})
        compiler.compile(hungry).result(RESULT_S)  # a child of up to 700 MiB
    _, alive = psutil.wait_procs(server.children(), timeout=RESULT_S)
    assert not alive
    assert server.memory_info().rss < before + 2**25
    small = GrammarCompiler(
        load_vocabulary, backend="xgrammar", limits=CompileLimits(memory_bytes=2**26)
    )
    try:
        with pytest.raises(InvalidArgumentError, match=r"too much memory|too large"):
            small.compile(StructuredOutputs(json=doubling(8, "anyOf"))).result(RESULT_S)
        small.compile(StructuredOutputs(json=FINE)).result(RESULT_S)
    finally:
        small.close()


def draw_many(constraint):
    """Draws tokens until the text or the grammar's time ends."""
    vocabulary = constraint.vocabulary
    with suppress(InvalidArgumentError):
        walk(constraint.new_matcher(vocabulary.eos_token_ids), vocabulary, 1, num_most=200)


def test_a_compiled_constraint_works(compiler):
    vocabulary = vocabulary_of("byte_level")
    constraint = compiler.compile(StructuredOutputs(json=FINE)).result(RESULT_S)
    tokens = walk(constraint.new_matcher(vocabulary.eos_token_ids), vocabulary, 3)
    assert isinstance(json.loads(text_of(vocabulary, tokens))["a"], int)


def test_llguidance_compiles_what_xgrammar_does_not_express(compiler):
    schema = {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 60}
    constraint = compiler.compile(StructuredOutputs(json=schema)).result(RESULT_S)
    assert type(constraint.grammar).__name__ == "_LLGuidanceGrammar"
    vocabulary = vocabulary_of("byte_level")
    for seed in range(5):
        tokens = walk(constraint.new_matcher(vocabulary.eos_token_ids), vocabulary, seed)
        assert int(text_of(vocabulary, tokens)) % 7 == 0


@pytest.mark.slow
def test_llguidance_compiles_what_takes_xgrammar_too_long(compiler):
    """Too long or too much memory, on a fast machine; not so within the first limit."""
    schema = doubling(9, "anyOf")
    chosen = GrammarCompiler(
        load_vocabulary, backend="xgrammar", limits=CompileLimits(timeout_s=0.3)
    )
    try:
        with pytest.raises(InvalidArgumentError, match=r"json took more than 0\.3 s to compile"):
            chosen.compile(StructuredOutputs(json=schema)).result(RESULT_S)
    finally:
        chosen.close()
    constraint = compiler.compile(StructuredOutputs(json=schema)).result(RESULT_S)
    assert type(constraint.grammar).__name__ == "_LLGuidanceGrammar"


def test_lark_is_compiled_by_llguidance_and_gbnf_by_xgrammar(compiler):
    lark = compiler.compile(StructuredOutputs(grammar='start: "a" /b+/')).result(RESULT_S)
    gbnf = compiler.compile(StructuredOutputs(grammar='root ::= "a" "b"+')).result(RESULT_S)
    assert type(lark.grammar).__name__ == "_LLGuidanceGrammar"
    assert type(gbnf.grammar).__name__ == "_XGrammar"
    vocabulary = vocabulary_of("byte_level")
    for constraint in (lark, gbnf):
        matcher = constraint.new_matcher(vocabulary.eos_token_ids)
        assert {vocabulary.tokens[i] for i in allowed_tokens(matcher, vocabulary)} == {b"a"}


def test_a_chosen_backend_refuses_what_it_does_not_enforce():
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    for name in ("xgrammar", "llguidance"):
        compiler = GrammarCompiler(load_vocabulary, backend=name)
        try:
            with pytest.raises(InvalidArgumentError, match=rf"uniqueItems.* \({name}\)$"):
                compiler.compile(StructuredOutputs(json=schema)).result(RESULT_S)
        finally:
            compiler.close()


def test_one_content_compiles_once_however_many_wait(compiler):
    outputs = StructuredOutputs(regex="once{1,200}")
    futures = [compiler.compile(StructuredOutputs(regex="once{1,200}")) for _ in range(20)]
    assert len(compiler._pending) == 1
    assert futures[0].cancel()  # the others still wait
    assert compiler.compile(outputs).result(RESULT_S) is futures[1].result(RESULT_S)
    cached = compiler.compile(outputs)
    assert cached.done()
    assert cached.result() is futures[1].result()


def test_a_grammar_that_no_request_waits_for_any_more_is_not_compiled(monkeypatch):
    compiler = new_compiler(num_workers=1)
    begun, go_on = threading.Event(), threading.Event()
    compiled = []

    def compile_slowly(outputs):
        begun.set()
        assert go_on.wait(RESULT_S)
        compiled.append(outputs.regex)
        raise ResourceExhaustedError("compiled")

    monkeypatch.setattr(compiler, "_compile_in_process", compile_slowly)
    try:
        first = compiler.compile(StructuredOutputs(regex="first"))
        assert begun.wait(RESULT_S)
        cancelled = [compiler.compile(StructuredOutputs(regex="second")) for _ in range(3)]
        last = compiler.compile(StructuredOutputs(regex="last"))
        assert all(future.cancel() for future in cancelled)
        go_on.set()
        for future in (first, last):
            assert isinstance(future.exception(RESULT_S), ResourceExhaustedError)
        assert compiled == ["first", "last"]
        assert not compiler._pending
    finally:
        compiler.close()


def test_the_cache_is_bounded_and_keeps_what_was_used_last():
    small = new_compiler(cache_bytes=1)
    try:
        constraint = small.compile(StructuredOutputs(regex="small")).result(RESULT_S)
        assert constraint.grammar.num_bytes > 1
        assert small._num_cached_bytes == 0
        assert not small.compile(StructuredOutputs(regex="small")).done()
        num_bytes = constraint.grammar.num_bytes
    finally:
        small.close()
    room = new_compiler(cache_bytes=int(2.5 * num_bytes))
    try:
        for regex in ("one", "two", "one", "six"):
            room.compile(StructuredOutputs(regex=regex)).result(RESULT_S)
        assert room.compile(StructuredOutputs(regex="one")).done()
        assert room._num_cached_bytes <= 2.5 * num_bytes
        assert not room.compile(StructuredOutputs(regex="two")).done()
    finally:
        room.close()


def test_a_refusal_is_remembered_for_a_while():
    now_s = [0.0]
    compiler = GrammarCompiler(load_vocabulary, backend="llguidance", clock=lambda: now_s[0])
    try:
        bad = StructuredOutputs(regex="([")
        with pytest.raises(InvalidArgumentError):
            compiler.compile(bad).result(RESULT_S)
        assert compiler.compile(bad).done()
        now_s[0] = 61.0
        again = compiler.compile(bad)
        assert not again.done()
        with pytest.raises(InvalidArgumentError):
            again.result(RESULT_S)
    finally:
        compiler.close()


def test_too_many_waiting_grammars_are_refused():
    compiler = new_compiler(max_waiting=2, num_workers=1)
    try:
        waiting = [compiler.compile(StructuredOutputs(regex=f"w{i}")) for i in range(2)]
        with pytest.raises(ResourceExhaustedError, match="2 grammars wait"):
            compiler.compile(StructuredOutputs(regex="w9")).result(0)
        for future in waiting:
            future.result(RESULT_S)
    finally:
        compiler.close()


def test_the_process_is_started_anew_after_it_died():
    compiler = new_compiler()
    compiler.compile(StructuredOutputs(regex="before")).result(RESULT_S)
    os.killpg(compiler._process._process.pid, signal.SIGKILL)
    # A process that dies while it compiles counts as one that the form was too much for.
    compiler._process._process.wait()
    constraint = compiler.compile(StructuredOutputs(regex="after a death")).result(RESULT_S)
    assert constraint.field == "structured_outputs.regex"
    compiler._process._process.kill()
    compiler._process._process.wait()
    compiler.compile(StructuredOutputs(regex="after another")).result(RESULT_S)
    compiler.close()


def test_closing_ends_what_waits():
    compiler = new_compiler(timeout_s=60.0)
    pending = compiler.compile(StructuredOutputs(regex="pending"))
    done = threading.Event()
    pending.add_done_callback(lambda _: done.set())
    compiler.close()
    compiler.close()
    assert done.wait(RESULT_S)
    assert isinstance(pending.exception(0), UnavailableError)
    with pytest.raises(UnavailableError):
        compiler.compile(StructuredOutputs(regex="late")).result(0)


def test_closing_while_the_vocabulary_loads_ends_what_waits(monkeypatch):
    is_loading, may_load, is_closed = threading.Event(), threading.Event(), threading.Event()

    def load_slowly():
        is_loading.set()
        may_load.wait(RESULT_S)
        return load_vocabulary()

    limits = CompileLimits(num_workers=1, max_waiting=2)
    compiler = GrammarCompiler(load_slowly, backend="llguidance", limits=limits)
    waiting = [compiler.compile(StructuredOutputs(regex=f"w{i}")) for i in range(2)]
    assert is_loading.wait(RESULT_S)
    with pytest.raises(ResourceExhaustedError, match="2 grammars wait"):
        compiler.compile(StructuredOutputs(regex="w9")).result(0)
    close_process = compiler._process.close
    monkeypatch.setattr(compiler._process, "close", lambda: (close_process(), is_closed.set()))
    closing = threading.Thread(target=compiler.close)
    closing.start()
    assert is_closed.wait(RESULT_S)
    with pytest.raises(UnavailableError):
        compiler.compile(StructuredOutputs(regex="late")).result(0)
    may_load.set()
    for future in waiting:
        with pytest.raises(UnavailableError):
            future.result(RESULT_S)
    closing.join(RESULT_S)
    assert not closing.is_alive()
    assert compiler._process._process is None


def test_a_vocabulary_that_cannot_be_loaded_is_tried_once_and_a_bug_again():
    problems = [KeyError("a bug"), ConfigurationError("no bytes")]

    def fail():
        raise problems.pop(0)

    compiler = GrammarCompiler(fail, backend="llguidance")
    try:
        with pytest.raises(InternalError, match="could not be compiled"):
            compiler.compile(StructuredOutputs(regex="a")).result(RESULT_S)
        for regex in ("a", "a", "b"):
            with pytest.raises(FailedPreconditionError, match="no bytes"):
                compiler.compile(StructuredOutputs(regex=regex)).result(RESULT_S)
    finally:
        compiler.close()


def test_a_missing_backend_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(grammar_backends, "installed_backends", lambda: ("llguidance",))
    with pytest.raises(ConfigurationError, match=r"xgrammar, which is not installed; run: pip ins"):
        grammar_backends.check_installed("xgrammar")
    grammar_backends.check_installed("auto")
    monkeypatch.setattr(grammar_backends, "installed_backends", lambda: ())
    with pytest.raises(ConfigurationError, match=r"xgrammar or llguidance, which is not installed"):
        grammar_backends.check_installed("auto")


def test_grammars_are_counted():
    metrics = EngineMetrics()
    compiler = GrammarCompiler(load_vocabulary, backend="llguidance", metrics=metrics)
    try:
        for _ in range(3):
            compiler.compile(StructuredOutputs(regex="[a-c]+")).result(RESULT_S)
        for _ in range(2):
            refused = compiler.compile(StructuredOutputs(regex="[a-c"))
            assert isinstance(refused.exception(RESULT_S), InvalidArgumentError)
    finally:
        compiler.close()
    values, histograms = metrics.snapshot()
    lookups = {one: values["baton_engine_grammar_lookups", one] for one in ("hit", "miss")}
    assert lookups == {"hit": 2 + 1, "miss": 2}
    name = "baton_engine_grammar_compile_seconds"
    counts = {result: sum(found.counts) for (one, result), found in _of(name, histograms)}
    assert counts == {"compiled": 1, "refused": 1, "failed": 0}


def _of(name, histograms):
    return [(series, found) for series, found in histograms.items() if series[0] == name]
