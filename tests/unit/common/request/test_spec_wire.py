"""Conversion of specs and sampling parameters to protobuf messages and back."""

import asyncio
import time
from dataclasses import fields, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from baton.common.request.default_params import over_defaults
from baton.common.request.request_spec import (
    ReasoningMarks,
    RequestSpec,
    client_id_of,
    unique_request_id,
)
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.spec_wire import (
    params_from_proto,
    read_message,
    sampling_to_proto,
    spec_from_proto,
    spec_to_proto,
    stated_from_proto,
    stopping_to_proto,
    text_to_proto,
)
from baton.common.request.structured_outputs import StructuredOutputs
from baton.v1 import common_pb2, request_pb2
from tests.support.loop_watch import watched_loops
from tests.support.rpc_servers import spec_message

TOKEN_ID = st.integers(0, 2**32 - 1)
STOPPING = {
    "max_tokens": st.integers(1, 2**32 - 1) | st.none(),
    "stop_token_ids": st.lists(TOKEN_ID, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "truncate_prompt_tokens": st.none() | st.just(-1) | st.integers(1, 2**31 - 1),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "detokenize": st.booleans(),
}
TEXT = st.text("ab é{", min_size=1, max_size=5)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
NAMED_JSON = st.dictionaries(st.text(max_size=3), JSON, max_size=3)
OUTPUTS = (
    st.builds(StructuredOutputs, json=NAMED_JSON, disable_any_whitespace=st.booleans())
    | st.builds(
        StructuredOutputs, json_object=st.just(True), whitespace_pattern=st.none() | st.just(" ?")
    )
    | st.builds(StructuredOutputs, regex=TEXT)
    | st.builds(StructuredOutputs, choice=st.lists(TEXT, min_size=1, max_size=3))
    | st.builds(StructuredOutputs, grammar=TEXT)
    | st.builds(StructuredOutputs, structural_tag=NAMED_JSON)
)
DRAWING = {
    "temperature": st.floats(0, 4, width=32),
    "top_k": st.integers(-1, 2**32 - 1),
    "top_p": st.floats(0.125, 1, width=32),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 10),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.none() | st.dictionaries(TOKEN_ID, st.floats(-100, 100), max_size=3),
    "allowed_token_ids": st.none() | st.lists(TOKEN_ID, min_size=1, max_size=3),
    "bad_words": st.lists(st.text("ab é", min_size=1, max_size=5), max_size=3),
    "min_tokens": st.integers(0, 1),
    "seed": st.integers(0, 2**64 - 1) | st.none(),
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "structured_outputs": st.none() | OUTPUTS,
    "thinking_token_budget": st.none() | st.integers(-1, 2**32 - 1),
    "extra_args": st.none() | NAMED_JSON,
    "prediction": st.text("ab é", max_size=5),
}
PARAMS = (
    st.builds(
        SamplingParams, n=st.integers(1, 4), best_of=st.integers(5, 64), **DRAWING, **STOPPING
    )
    | st.builds(
        SamplingParams,
        n=st.integers(1, 4),
        stop=st.lists(st.text("ab é", min_size=1, max_size=5), max_size=3),
        **(STOPPING | {"detokenize": st.just(True)}),
    )
    | st.builds(
        SamplingParams,
        n=st.integers(1, 4),
        beam_width=st.integers(4, 64),
        length_penalty=st.floats(-3, 3),
        early_stopping=st.sampled_from([False, True, "never"]),
        **STOPPING,
    )
)
SPEC = RequestSpec(
    request_id="r/0123456789abcdef",
    prompt_token_ids=(5, 6),
    params=SamplingParams(
        seed=3,
        max_tokens=7,
        stop=["x", "yz"],
        stop_token_ids=[9],
        min_tokens=2,
        presence_penalty=0.1,
        logit_bias={4: -1.5, 3: 0.1},
        allowed_token_ids=[3, 4, 9],
        bad_words=["no"],
        logprobs=0,
        structured_outputs=StructuredOutputs(json={"type": "integer"}, whitespace_pattern=" "),
        thinking_token_budget=0,
        extra_args={"bias": {"ü": [1, 0.5, None]}},
    ),
    stop_token_ids=frozenset({2, 9}),
    priority=-4,
    cache_salt="tenant",
    bad_words_token_ids=((3,), (4, 3)),
    reasoning=ReasoningMarks(start_token_ids=(), end_token_ids=(8, 7)),
    prediction_token_ids=(7, 5, 7),
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
)


def messages_of(params, *only):
    """The three messages of the parameters, with these fields set, or all if none are named."""
    return [
        to_proto(params, *([only] if only else []))
        for to_proto in (sampling_to_proto, stopping_to_proto, text_to_proto)
    ]


@settings(deadline=None)
@given(PARAMS)
def test_sampling_parameters_survive_a_round_trip(params):
    assert params_from_proto(*messages_of(params)) == params


DEFAULTS = {"temperature": 0.5, "top_k": 3, "min_p": 0.25, "max_tokens": 99}


def test_defaults_fill_the_fields_that_are_not_set():
    some = messages_of(SamplingParams(temperature=1.0, max_tokens=7), "temperature", "max_tokens")
    params = over_defaults(stated_from_proto(*some), DEFAULTS)
    assert params == SamplingParams(temperature=1.0, max_tokens=7, top_k=3, min_p=0.25)
    nothing = messages_of(SamplingParams(), "seed")
    assert over_defaults(stated_from_proto(*nothing), DEFAULTS) == SamplingParams(**DEFAULTS)
    all_stated = messages_of(SamplingParams())
    assert over_defaults(stated_from_proto(*all_stated), DEFAULTS) == SamplingParams()


def test_beam_search_takes_only_the_default_of_max_tokens():
    beams = messages_of(SamplingParams(beam_width=2), "beam_width")
    params = over_defaults(stated_from_proto(*beams), DEFAULTS)
    assert params == SamplingParams(beam_width=2, max_tokens=99)


def test_every_parameter_has_a_field():
    """A parameter without a field would not reach the workers."""
    names = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    names |= {field.name for field in common_pb2.StoppingParams.DESCRIPTOR.fields}
    names |= {field.name for field in common_pb2.TextParams.DESCRIPTOR.fields}
    names |= {field.name for field in common_pb2.BeamSearch.DESCRIPTOR.fields}
    names = names - {"beam_search", "extra_args_json"} | {"extra_args"}
    assert names | {"output_kind"} == {field.name for field in fields(SamplingParams)}
    forms = {field.name for field in common_pb2.StructuredOutputs.DESCRIPTOR.fields}
    assert forms == {field.name for field in fields(StructuredOutputs)}


def test_unset_fields_take_the_defaults_and_zeros_stay_zeros():
    nothing = common_pb2.SamplingParams(), common_pb2.StoppingParams()
    assert params_from_proto(*nothing) == SamplingParams()
    zero = common_pb2.SamplingParams(temperature=0.0, seed=0)
    assert params_from_proto(zero, nothing[1]) == SamplingParams(temperature=0.0, seed=0)


def test_an_unknown_value_of_early_stopping_is_refused():
    search = common_pb2.BeamSearch(beam_width=2, early_stopping=9)
    message = common_pb2.SamplingParams(beam_search=search)
    with pytest.raises(InvalidArgumentError, match="early_stopping is 9"):
        params_from_proto(message, common_pb2.StoppingParams())


def test_a_spec_survives_a_round_trip_with_its_remaining_time():
    now = time.monotonic()
    message = spec_to_proto(replace(SPEC, deadline=now + 5))
    assert 4000 < message.timeout_ms <= 5000
    back = spec_from_proto(message, now=100.0)
    assert back.deadline == 100.0 + message.timeout_ms / 1000
    assert replace(back, deadline=None) == SPEC


def test_workers_get_the_tokens_of_a_prediction_not_its_text():
    params = replace(SPEC.params, prediction="a text")
    message = spec_to_proto(replace(SPEC, params=params, deadline=time.monotonic() + 5))
    assert not message.sampling.HasField("prediction")
    assert list(message.prediction_token_ids) == [7, 5, 7]


def test_only_parameters_that_differ_from_the_defaults_are_sent():
    deadline = time.monotonic() + 5
    message = spec_to_proto(replace(SPEC, params=SamplingParams(seed=0), deadline=deadline))
    assert message.sampling == common_pb2.SamplingParams(seed=0)
    assert message.stopping == common_pb2.StoppingParams(max_tokens=16)
    greedy = SamplingParams(seed=0, temperature=0, ignore_eos=True)
    message = spec_to_proto(replace(SPEC, params=greedy, deadline=deadline))
    assert message.sampling == common_pb2.SamplingParams(seed=0, temperature=0)
    assert message.stopping == common_pb2.StoppingParams(max_tokens=16, ignore_eos=True)


def test_every_field_of_a_spec_is_on_the_wire():
    names = {field.name for field in request_pb2.RequestSpec.DESCRIPTOR.fields}
    params = {"sampling", "stopping"}
    own = {field.name for field in fields(RequestSpec)} - {"params", "deadline"}
    assert names == own | params | {"timeout_ms"}


def test_a_passed_deadline_is_an_error():
    with pytest.raises(DeadlineExceededError, match="request r exceeded its deadline"):
        spec_to_proto(replace(SPEC, deadline=time.monotonic() - 1))


@pytest.mark.parametrize(
    "schema",
    ['{"a": [' + "{}," * 80_000 + "{}]}", '{"enum": [' + "1," * 120_000 + "1]}"],
    ids=["objects", "integers"],
)
async def test_a_large_schema_does_not_block_the_event_loop(schema: str):
    message = spec_message("r")
    message.sampling.structured_outputs.json = schema
    with watched_loops() as watch:
        read = partial(spec_from_proto, message, now=time.monotonic())
        spec = await asyncio.create_task(read_message(message, read))
    watch.assert_never_blocked()
    assert spec.params.structured_outputs is not None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"timeout_ms": 0}, "timeout_ms is 0"),
        ({"sampling": common_pb2.SamplingParams()}, "seed"),
        ({"sampling": common_pb2.SamplingParams(seed=1, temperature=float("nan"))}, "temperature"),
        ({"sampling": common_pb2.SamplingParams(seed=1, top_p=0.0)}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stopping": common_pb2.StoppingParams()}, "max_tokens is unset"),
        ({"sampling": common_pb2.SamplingParams(seed=1, n=65)}, "n is 65"),
        ({"sampling": common_pb2.SamplingParams(seed=1, n=2, best_of=1)}, "n is 2"),
        ({"sampling": common_pb2.SamplingParams(seed=1, beam_search={})}, "beam_width is 0"),
        (
            {"sampling": common_pb2.SamplingParams(seed=1, structured_outputs={})},
            "structured_outputs sets no form",
        ),
        (
            {"sampling": common_pb2.SamplingParams(seed=1, structured_outputs={"json": "{"})},
            r"structured_outputs\.json is not JSON",
        ),
        (
            {"sampling": common_pb2.SamplingParams(seed=1, extra_args_json="[]")},
            r"extra_args is \[\]; it must be a JSON object",
        ),
        (
            {"sampling": common_pb2.SamplingParams(seed=1, extra_args_json="")},
            "extra_args is empty",
        ),
        ({"reasoning": request_pb2.ReasoningMarks(start_token_ids=[1])}, "reasoning.end_token_ids"),
    ],
)
def test_bad_fields_are_named(changes, field):
    with pytest.raises(InvalidArgumentError, match=field):
        spec_from_proto(spec_message(**{"request_id": "r", **changes}), now=0.0)


def unknown_field(number):
    """Returns the encoding of a field that this build does not know, as a newer router may send."""
    tag = number << 3  # a varint of two bytes
    return bytes([tag & 0x7F | 0x80, tag >> 7, 1])


def test_forms_that_are_not_set_cost_nothing():
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    message = sampling_to_proto(params)
    assert message.structured_outputs == common_pb2.StructuredOutputs(regex="a")
    unset = sampling_to_proto(SamplingParams())
    assert not unset.HasField("structured_outputs")
    assert not unset.HasField("thinking_token_budget")
    assert not unset.HasField("extra_args_json")


def test_extra_args_at_their_limit_can_be_sent():
    params = SamplingParams(extra_args={"a": "é" * (2**15 - 4)})
    assert params_from_proto(*messages_of(params)) == params


def test_unknown_fields_of_a_newer_router_are_refused_by_number():
    message = spec_message("r")
    sampling = message.sampling.SerializeToString() + unknown_field(214)
    message.sampling.MergeFrom(common_pb2.SamplingParams.FromString(sampling))
    newer = request_pb2.RequestSpec.FromString(message.SerializeToString() + unknown_field(115))
    with pytest.raises(
        FailedPreconditionError, match=r"field 115 of spec, field 214 of spec\.sampling"
    ):
        spec_from_proto(newer, now=0.0)


def test_request_ids_are_unique_and_contain_the_id_of_the_client():
    ids = {unique_request_id("c/d") for _ in range(9)}
    assert len(ids) == 9
    assert {client_id_of(each) for each in ids} == {"c/d"}
    assert client_id_of("c/d") == "c/d"


def test_parts_of_a_form_survive_the_wire():
    tools = [
        {"type": "function", "function": {"name": name, "strict": is_strict}}
        for name, is_strict in (("a", True), ("b", False))
    ]
    outputs = StructuredOutputs.of_tools(tools, "required")
    params = SamplingParams(structured_outputs=outputs)
    received = params_from_proto(*messages_of(params)).structured_outputs
    assert received.parts == outputs.parts
    assert received.key == outputs.key
