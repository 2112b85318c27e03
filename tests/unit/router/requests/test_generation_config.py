"""Sampling defaults from a checkpoint's generation_config.json."""

import json

import pytest

from baton.common.errors import ConfigurationError, InvalidArgumentError
from baton.common.model_files.named_models import demo_model_path
from baton.common.request.default_params import over_defaults
from router.requests.generation_config import load_default_params


@pytest.fixture
def write(tmp_path):
    def write(content):
        (tmp_path / "generation_config.json").write_text(content)
        return str(tmp_path)

    return write


def test_the_fields_that_vllm_uses_are_read(write):
    stated = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
    }
    model = write(json.dumps(stated | {"do_sample": True, "eos_token_id": [1, 2], "num_beams": 4}))
    assert load_default_params(model, "auto") == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }
    assert load_default_params(model, "none") == {}


def test_null_means_unset_and_zero_means_zero(write):
    model = write('{"temperature": 0, "top_k": null}')
    assert load_default_params(model, "auto") == {"temperature": 0}


def test_a_default_length_does_not_forbid_the_least_length_that_is_stated(write):
    defaults = load_default_params(write('{"max_new_tokens": 8}'), "auto")
    assert over_defaults({"min_tokens": 20}, defaults).max_tokens == 20
    assert over_defaults({"min_tokens": 5}, defaults).max_tokens == 8
    with pytest.raises(InvalidArgumentError, match=r"min_tokens is 20; it must be in \[0, 9\]"):
        over_defaults({"min_tokens": 20, "max_tokens": 9}, defaults)
    with pytest.raises(InvalidArgumentError, match="min_tokens is '20'"):
        over_defaults({"min_tokens": "20"}, defaults)


def test_the_file_is_optional(tmp_path):
    assert load_default_params(str(tmp_path), "auto") == {}


def test_none_does_not_look_for_the_model():
    assert load_default_params("/nowhere/at/all", "none") == {}


def test_the_demo_model_states_no_defaults():
    assert load_default_params(str(demo_model_path()), "auto") == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting"),
        ("[1]", ""),
        ("[" * 100_000, "recursion"),
        ('"caf\\ud800"', ""),
    ],
)
def test_a_bad_file_is_named_with_the_reason(write, content, reason):
    model = write(content)
    with pytest.raises(ConfigurationError, match=rf"{model}/generation_config\.json: .*{reason}"):
        load_default_params(model, "auto")


@pytest.mark.parametrize(
    ("entry", "value", "reason"),
    [
        ("top_p", "1.5", r"top_p is 1.5; it must be in \(0, 1\]"),
        ("temperature", '"hot"', "temperature is 'hot'; it must be a number"),
        ("temperature", "true", "temperature is True; it must be a number"),
        ("temperature", "[1]", r"temperature is \[1\]; it must be a number"),
        ("temperature", "NaN", "temperature is nan; it must be finite"),
        ("temperature", "1" + "0" * 400, "int too large"),
        ("min_p", '"0.1"', "min_p is '0.1'; it must be a number"),
        ("repetition_penalty", "0", "repetition_penalty is 0; it must be finite and > 0"),
        ("top_k", "20.5", "top_k is 20.5; it must be an integer"),
        ("top_k", "Infinity", "infinity"),
        ("top_k", "false", "top_k is False; it must be a number"),
        ("max_new_tokens", "0", "max_tokens is 0"),
        ("max_new_tokens", "7.5", "max_tokens is 7.5; it must be an integer"),
        ("max_new_tokens", "NaN", "NaN"),
    ],
)
def test_a_bad_entry_is_named_with_the_reason(write, entry, value, reason):
    model = write(f'{{"top_k": 5, "{entry}": {value}}}')
    named = rf"^{model}/generation_config\.json, {entry}: .*{reason}"
    with pytest.raises(ConfigurationError, match=named):
        load_default_params(model, "auto")


def test_integral_numbers_are_integers(write):
    defaults = load_default_params(write('{"top_k": 20.0, "max_new_tokens": 64.0}'), "auto")
    assert defaults == {"top_k": 20, "max_tokens": 64}
    assert {type(value) for value in defaults.values()} == {int}


def test_a_file_that_cannot_be_read_is_named(write, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("no permission")

    model = write("{}")
    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(
        ConfigurationError, match=rf"^cannot read {model}/generation_config\.json: no p"
    ):
        load_default_params(model, "auto")


def test_another_choice_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="--generation-config is 'vllm'; it must be one"):
        load_default_params(str(tmp_path), "vllm")


def test_a_named_models_recommended_values_hold_where_its_file_states_none(tmp_path, monkeypatch):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    recommended = {str(tmp_path): {"temperature": 0.2, "top_p": 0.9}}
    monkeypatch.setattr("router.requests.generation_config.RECOMMENDED_PARAMS", recommended)
    assert load_default_params(str(tmp_path), "auto") == {"temperature": 0.5, "top_p": 0.9}
    assert load_default_params(str(tmp_path), "none") == {}
