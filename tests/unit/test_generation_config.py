"""Sampling defaults from a checkpoint's generation_config.json."""

import json

import pytest

from baton.demo import demo_model_path
from baton.errors import ConfigurationError
from router.generation_config import load_default_params


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
        ('{"top_p": 1.5}', r"top_p is 1.5; it must be in \(0, 1\]"),
        ('{"temperature": "hot"}', ""),
    ],
)
def test_a_bad_file_is_named_with_the_reason(write, content, reason):
    model = write(content)
    with pytest.raises(ConfigurationError, match=rf"{model}/generation_config\.json: .*{reason}"):
        load_default_params(model, "auto")


def test_another_choice_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="--generation-config is 'vllm'; it must be one"):
        load_default_params(str(tmp_path), "vllm")
