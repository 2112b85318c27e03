"""`SamplingParams`: limits, None, and forms of values."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from baton.common.errors import InvalidArgumentError
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.spec_wire import params_from_proto
from baton.common.request.structured_outputs import StructuredOutputs
from baton.v1 import common_pb2

DEFAULTS = SamplingParams()
MANY = 2**32 - 1


def test_the_defaults_are_those_of_vllm():
    assert (
        SamplingParams(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=None,
            allowed_token_ids=None,
            bad_words=(),
            min_tokens=0,
            seed=None,
            max_tokens=16,
            stop=(),
            stop_token_ids=(),
            include_stop_str_in_output=False,
            ignore_eos=False,
            n=1,
            logprobs=None,
            prompt_logprobs=None,
            truncate_prompt_tokens=None,
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            detokenize=True,
            structured_outputs=None,
            thinking_token_budget=None,
            extra_args=None,
        )
        == DEFAULTS
    )


@pytest.mark.parametrize("name", sorted(field.name for field in fields(SamplingParams)))
def test_none_stands_for_the_default_and_max_tokens_for_as_many_as_fit(name):
    value = getattr(SamplingParams(**{name: None}), name)
    assert value == (MANY if name == "max_tokens" else getattr(DEFAULTS, name))


def test_values_take_one_form():
    params = SamplingParams(
        top_k=-1,
        stop="end",
        bad_words="no",
        stop_token_ids=[3],
        allowed_token_ids={5: None}.keys(),
        logit_bias={"7": 1, 2: -1.5},
    )
    assert (params.top_k, params.stop, params.bad_words) == (0, ("end",), ("no",))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((3,), (5,))
    assert list(params.logit_bias.items()) == [(2, -1.5), (7, 1.0)]
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert replace(params) == params


def test_structured_outputs_may_be_a_mapping_of_its_fields():
    schema = {"type": "integer"}
    params = SamplingParams(structured_outputs={"json": schema, "disable_any_whitespace": True})
    expected = StructuredOutputs(json=schema, disable_any_whitespace=True)
    assert params.structured_outputs == expected
    assert SamplingParams(structured_outputs=expected).structured_outputs is expected
    choices = {"choice": ["a"], "regex": None}
    assert SamplingParams(structured_outputs=choices).structured_outputs.choice == ("a",)


def test_a_copy_with_a_seed_has_all_other_values():
    params = SamplingParams(temperature=0.5, stop=["a"], stop_token_ids=[7], logit_bias={3: 1.0})
    assert params.with_seed(9) == replace(params, seed=9)
    assert params.seed is None


def test_a_thinking_budget_of_minus_one_is_no_limit():
    assert SamplingParams(thinking_token_budget=-1) == DEFAULTS
    assert SamplingParams(thinking_token_budget=0).thinking_token_budget == 0


def test_extra_args_are_kept_as_a_copy_of_json_values():
    given = {"b": [1, {"c": None}], "a": ("x", 0.5)}
    params = SamplingParams(extra_args=given)
    given["b"].append(2)
    assert params.extra_args == {"b": [1, {"c": None}], "a": ["x", 0.5]}
    assert SamplingParams(extra_args='{"b": [1, {"c": null}], "a": ["x", 0.5]}') == params
    assert replace(params) == params
    assert SamplingParams(extra_args={}) == DEFAULTS


def test_arrays_are_lists_of_token_ids():
    params = SamplingParams(
        stop_token_ids=np.array([3, 4]), allowed_token_ids=np.array([5], dtype=np.uint8)
    )
    assert (params.stop_token_ids, params.allowed_token_ids) == ((3, 4), (5,))
    assert type(params.allowed_token_ids[0]) is int


def test_repeated_ids_of_allowed_tokens_are_removed():
    assert SamplingParams(allowed_token_ids=[9, 3, 9, 9, 3]).allowed_token_ids == (9, 3)


class Uncopied(list):
    """Entries that can be counted but not read."""

    def __init__(self, number):
        self._number = number

    def __len__(self):
        return self._number

    def __iter__(self):
        raise AssertionError("an entry was read")

    items = __iter__


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("stop", 16),
        ("stop_token_ids", 16),
        ("bad_words", 256),
        ("logit_bias", 1024),
        ("allowed_token_ids", 2**18),
    ],
)
def test_too_many_entries_are_refused_without_reading_them(name, most):
    message = f"^{name} has {most + 1} entries; at most {most} are allowed$"
    with pytest.raises(InvalidArgumentError, match=message):
        SamplingParams(**{name: Uncopied(most + 1)})


def test_too_many_allowed_tokens_of_a_message_are_refused():
    sampling = common_pb2.SamplingParams(allowed_token_ids=[7] * (2**18 + 1))
    with pytest.raises(InvalidArgumentError, match=r"^allowed_token_ids has 262145 entries"):
        params_from_proto(sampling, common_pb2.StoppingParams())


GOOD = [
    {"temperature": 0},
    {"top_k": MANY},
    {"top_p": 1},
    {"min_p": 0},
    {"min_p": 1},
    {"repetition_penalty": 1e-9},
    {"presence_penalty": -2},
    {"presence_penalty": 2},
    {"frequency_penalty": -2},
    {"frequency_penalty": 2},
    {"logit_bias": {0: -100, MANY: 100}},
    {"logit_bias": dict.fromkeys(range(1024), 1.0)},
    {"allowed_token_ids": [0, MANY]},
    {"allowed_token_ids": range(2**18)},
    {"bad_words": ["x" * 256] * 256},
    {"min_tokens": 16},
    {"min_tokens": 5000, "max_tokens": None},
    {"seed": 2**64 - 1},
    {"max_tokens": MANY},
    {"stop": ["x" * 256] * 16},
    {"stop_token_ids": range(16)},
    {"n": 64},
    {"logprobs": 20, "prompt_logprobs": 0},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 1},
    {"beam_width": 2, "stop_token_ids": [3], "skip_special_tokens": False},
]
BAD = [
    ({"temperature": -0.1}, r"temperature is -0.1; it must be finite and >= 0"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": 1e39}, "temperature is inf; it must be finite and >= 0"),
    ({"top_k": -2}, r"top_k is -2; it must be in \[0, 2\*\*32\), or -1"),
    ({"top_p": 0}, r"top_p is 0; it must be in \(0, 1\]"),
    ({"top_p": 1e-46}, r"top_p is 0.0; it must be in \(0, 1\]"),
    ({"top_p": 10**400}, "top_p is an integer of more than 20 digits"),
    ({"min_p": -0.1}, r"min_p is -0.1; it must be in \[0, 1\]"),
    ({"min_p": 1.1}, "min_p is 1.1"),
    ({"min_p": math.nan}, "min_p is nan"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be finite and > 0"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
    ({"presence_penalty": 2.1}, r"presence_penalty is 2.1; it must be in \[-2, 2\]"),
    ({"frequency_penalty": -2.1}, r"frequency_penalty is -2.1; it must be in \[-2, 2\]"),
    ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
    ({"logit_bias": {3: 100.5}}, r"logit_bias is 100.5; it must be in \[-100, 100\]"),
    ({"logit_bias": {3: math.nan}}, "logit_bias is nan"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias is -1; it must be below the vocabulary size"),
    ({"logit_bias": {"x": 1}}, r"logit_bias is \{'x': 1\}; it must be a mapping from token ids"),
    ({"logit_bias": {5.7: 1}}, r"logit_bias is \{5.7: 1\}"),
    ({"logit_bias": {5: "much"}}, r"logit_bias is \{5: 'much'\}"),
    ({"logit_bias": [(5, 1.0)]}, r"logit_bias is \[\(5, 1.0\)\]"),
    ({"logit_bias": 5}, "logit_bias is 5; it must be a mapping"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 entries; at most 1024"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": [2**32]}, "allowed_token_ids is 4294967296"),
    ({"bad_words": ["x"] * 257}, "bad_words has 257 entries; at most 256"),
    ({"bad_words": ["fine", ""]}, "bad_words is ''; it must be 1 to 256 bytes"),
    ({"min_tokens": -1}, r"min_tokens is -1; it must be in \[0, 16\], max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens is 9; it must be in \[0, 8\]"),
    ({"seed": 2**64}, "seed is"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": 2**32}, "max_tokens is 4294967296"),
    ({"stop": ["x"] * 17}, "stop has 17 entries; at most 16"),
    ({"stop": "é" * 129}, "stop is"),
    ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
    ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of token ids"),
    ({"stop_token_ids": ["x"]}, r"stop_token_ids is \['x'\]; it must be a list of token ids"),
    ({"bad_words": 5}, "bad_words is 5; it must be a list of texts"),
    ({"stop_token_ids": range(17)}, "stop_token_ids has 17 entries"),
    ({"stop": "x", "detokenize": False}, "stop is set together with detokenize=False"),
    ({"n": 65}, "n is 65"),
    ({"logprobs": -1}, r"logprobs is -1; it must be in \[0, 20\]"),
    ({"logprobs": 21}, "logprobs is 21"),
    ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be in"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
    ({"truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens is 2147483648"),
    ({"structured_outputs": "a+"}, r"structured_outputs is 'a\+'; it must be a StructuredOutputs"),
    ({"structured_outputs": {}}, "structured_outputs sets no form"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs has no field 'regexp'; it has j"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not JSON"),
    ({"thinking_token_budget": -2}, "thinking_token_budget is -2; it must be an integer in"),
    ({"thinking_token_budget": 2**32}, "thinking_token_budget is 4294967296"),
    ({"thinking_token_budget": 1.0}, "thinking_token_budget is 1.0"),
    ({"thinking_token_budget": True}, "thinking_token_budget is True"),
    ({"extra_args": [1]}, "extra_args is .+; it must be a JSON object"),
    ({"extra_args": "[1]"}, "extra_args is .+; it must be a JSON object"),
    ({"extra_args": "{"}, "extra_args is not JSON: Expecting"),
    ({"extra_args": {"a": {3: 4}}}, "extra_args has the key 3; keys must be texts"),
    ({"extra_args": {"a": math.nan}}, "extra_args is not JSON: Out of range float"),
    ({"extra_args": {"a": object()}}, "extra_args is not JSON: Object of type object"),
    ({"extra_args": {"a": "x" * 2**16}}, "extra_args has 65544 bytes of UTF-8; at most 65536"),
    ({"extra_args": {"a": "\ud800"}}, "extra_args is not valid Unicode"),
    ({"prediction": ["a"]}, r"prediction is \['a'\]; it must be a text"),
]


@pytest.mark.parametrize("values", GOOD, ids=lambda values: ",".join(values))
def test_values_at_the_limits_are_accepted(values):
    SamplingParams(**values)


@pytest.mark.parametrize(("values", "message"), BAD)
def test_a_value_beyond_its_limit_is_refused_by_name(values, message):
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "value",
    [
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
        {"bad_words": ["no"]},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"structured_outputs": StructuredOutputs(regex="a")},
        {"thinking_token_budget": 0},
        {"extra_args": {"a": 1}},
    ],
)
def test_beam_search_refuses_what_it_cannot_obey(value):
    (name,) = value
    with pytest.raises(InvalidArgumentError, match=f"^{name} is set together with beam_width"):
        SamplingParams(beam_width=2, **value)
    SamplingParams(n=2, best_of=3, **value)


@pytest.mark.parametrize("name", ["guided_decoding", "logits_processors"])
def test_options_that_do_not_exist_are_refused_by_name(name):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize("value", [1.5, "1", [1], math.nan])
@pytest.mark.parametrize(
    "name",
    [
        *("n", "best_of", "beam_width", "top_k", "min_tokens", "max_tokens", "seed"),
        *("logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
    ],
)
def test_a_number_that_is_no_integer_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgumentError, match=f"{name} is .*; it must be an integer"):
        SamplingParams(**{name: value})


def test_integers_become_those_of_python():
    params = SamplingParams(prompt_logprobs=True, max_tokens=np.int64(3))
    assert type(params.prompt_logprobs) is type(params.max_tokens) is int


@pytest.mark.parametrize("value", [0, "no", [True]])
@pytest.mark.parametrize(
    "name", ["ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"]
)
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(InvalidArgumentError, match=f"{name} is .*; it must be True or False"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_are_texts(name):
    with pytest.raises(InvalidArgumentError, match=f"{name} is 5; it must be a list of texts"):
        SamplingParams(**{name: ["a", 5]})
