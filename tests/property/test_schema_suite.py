"""What the JSON Schema Test Suite says of values holds for texts under the masks of its schemas.

Each schema is compiled as `auto` does. Some are refused; none may be enforced in part.
"""

import itertools
import json
import os
import random
from collections import Counter

import jsonschema
import pytest

from baton.common.errors import InvalidArgumentError
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.backends import compile_with
from engine.constraints.compile_server import try_out
from engine.constraints.matcher import Constraint
from engine.constraints.schema import check_schema, close_objects
from tests.support.constraints import BACKENDS, backend_of, vocabulary_of
from tests.support.json_schemas import text_of, walk
from tests.support.schema_suite import DRAFTS, mixed_schema, suite_cases, suite_files

KIND = "byte_level"
# Values that a schema accepts and no text under its masks has, by a part of the case's name.
NARROWER = {
    "/format:": "formats are enforced, not only annotations",
    "draft7/ref: ref overrides any sibling": "keywords beside $ref are enforced in all drafts",
}
JUNK = (
    *(None, True, False, 0, -1, 1.5, 1e300, -(2**70), "", "#", "x", "integer", "\x00"),
    *([], {}, [[]], [{}], [1], ["a"], [None], [True], ["string", "integer"], {"a": 1}),
    *({"type": "string"}, {"$ref": "#"}, {"$ref": []}, {"type": {}}),
)


def compiled(schema):
    """The backend's name and the constraint; raises InvalidArgumentError as the compiler does."""
    outputs = StructuredOutputs(json=schema)
    check_schema(json.loads(outputs.json), "structured_outputs.json")
    backends = {name: backend_of(name, KIND) for name in BACKENDS}
    found = compile_with(backends, "auto", outputs)
    grammar = backends[found.backend].load(found.data)
    constraint = Constraint(grammar, vocabulary_of(KIND), "structured_outputs.json")
    try_out(constraint)
    return found.backend, constraint


def compiled_or_refused(schema):
    """As `compiled`; ("refused", None) if the schema is refused with an error of its field."""
    try:
        return compiled(schema)
    except InvalidArgumentError as error:
        if not error.message.startswith("structured_outputs.json"):
            raise
        return "refused", None


def accepts(constraint, text):
    """Whether a matcher accepts a text byte by byte, and lets it end."""
    vocabulary = constraint.vocabulary
    matcher = constraint.new_matcher(vocabulary.eos_token_ids)
    tokens = [vocabulary.tokens.index(bytes([byte])) for byte in text.encode()]
    return matcher.replay(tokens) and matcher.may_stop


def texts_of(value):
    """JSON texts of a value: with whitespace and without, with escapes and without."""
    for separators in ((",", ":"), None):
        for ascii_only in (False, True):
            yield json.dumps(value, separators=separators, ensure_ascii=ascii_only)


def orders_of(value):
    """The value with its keys in every order: a grammar has properties in that of the schema."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*map(list, map(orders_of, value))))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for children in itertools.product(*(list(orders_of(value[name])) for name in names)):
                yield dict(zip(names, children, strict=True))
    elif isinstance(value, float) and value.is_integer():
        yield int(value)  # constants and integers have no fraction
    else:
        yield value


def is_expected(case, value):
    """Whether a valid value is one when objects have only the properties that are listed."""
    if any(part in case.name for part in NARROWER):
        return False
    return validator_of(close_objects(case.schema)).is_valid(value)


def validator_of(schema):
    is_draft7 = schema.get("$schema") == DRAFTS["draft7"]
    return (jsonschema.Draft7Validator if is_draft7 else jsonschema.Draft202012Validator)(schema)


def check_walks(constraint, schema, seeds):
    """Random texts under the masks are instances of the schema."""
    validator = validator_of(schema)
    for seed in seeds:
        tokens = walk(
            constraint.new_matcher(constraint.vocabulary.eos_token_ids),
            constraint.vocabulary,
            seed,
            num_free=20,
            num_most=200,
        )
        if tokens is not None:
            text = text_of(constraint.vocabulary, tokens)
            assert validator.is_valid(json.loads(text)), (schema, text)


def check_case(case):
    """Returns which backend compiled the case's schema; checks it against the case's values."""
    backend, constraint = compiled_or_refused(case.schema)
    if constraint is None:
        return backend
    for value in case.invalid:
        for text in texts_of(value):
            assert not accepts(constraint, text), (case.name, text)
    for value in case.valid:
        if is_expected(case, value):
            texts = [next(texts_of(ordered)) for ordered in orders_of(value)]
            assert any(accepts(constraint, text) for text in texts), (case.name, texts[0])
    check_walks(constraint, case.schema, range(2))
    return backend


@pytest.mark.parametrize(("draft", "least"), [("draft2020-12", 150), ("draft7", 45)])
def test_every_schema_of_the_suite_is_enforced_or_refused(draft, least):
    files = [file for file in suite_files() if file[0] == draft]
    counts = Counter(check_case(case) for file in files for case in suite_cases(*file))
    assert counts["xgrammar"] > 0
    assert counts.total() - counts["refused"] > least


def check_mixed(seeds):
    """Whatever is compiled is enforced; returns how many are."""
    num_compiled = 0
    for seed in seeds:
        schema = mixed_schema(seed)
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError:
            continue
        _, constraint = compiled_or_refused(schema)
        if constraint is None:
            continue
        num_compiled += 1
        if '"multipleOf":0.' not in json.dumps(schema, separators=(",", ":")):
            check_walks(constraint, schema, [seed])  # jsonschema divides floats
    return num_compiled


def check_malformed(seeds):
    """Whatever a schema has in it, it is compiled or refused with a typed error."""
    for seed in seeds:
        compiled_or_refused(mixed_schema(seed, JUNK))


def test_schemas_mixed_of_the_suite_are_enforced_or_refused():
    assert check_mixed(range(250)) > 35


def test_malformed_schemas_are_refused_with_a_typed_error():
    check_malformed(range(500))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_mixed_schemas():
    # On CI the same each time, as those of hypothesis.
    seed = 10**9 if os.environ.get("CI") else random.randrange(10**9, 10**10)
    assert check_mixed(range(seed, seed + 2_000)) > 250
    check_malformed(range(seed, seed + 4_000))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$schema": "http://json-schema.org/draft-03/schema#", "disallow": "null"}, "draft 4"),
        ({"type": []}, "an empty type at #"),
        ({"type": [{"type": "null"}]}, "is not supported: type"),
        ({"type": "object", "required": [["a"]]}, "is not supported: required"),
        ({"type": "object", "patternProperties": {"a": {}}, "minProperties": 2}, "keys may repeat"),
        ({"enum": [False], "type": "integer"}, "is not supported: enum"),
        ({"const": 1, "type": ["null", "string"]}, "is not supported: const"),
    ],
)
def test_schemas_that_were_enforced_in_part_or_broke_are_refused(schema, reason):
    with pytest.raises(InvalidArgumentError, match=reason):
        compiled(schema)
