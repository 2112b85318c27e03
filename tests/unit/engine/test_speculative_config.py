"""`--speculative-config`: vLLM's keys, and errors that name them."""

import pytest

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.speculative_config import SpeculativeConfig


def test_a_json_object_and_a_mapping_are_the_same() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)

    assert SpeculativeConfig.of(text) == expected
    assert EngineConfig(model="m", speculative_config=text).speculative_config == expected
    given = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert EngineConfig(model="m", speculative_config=given).speculative_config == expected
    assert SpeculativeConfig.of(expected) is expected
    assert SpeculativeConfig.of(str(expected)) == expected  # as `baton serve` passes it on


def test_a_model_drafts_if_it_is_the_only_key() -> None:
    expected = SpeculativeConfig(method="draft_model", model="small")

    assert SpeculativeConfig.of('{"model": "small"}') == expected
    assert expected.has_model
    assert not SpeculativeConfig(method="suffix").has_model


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("{}", "method of --speculative-config is None"),
        ('{"method": "psychic"}', "'psychic'; it must be one of ngram, suffix, draft_model"),
        ('{"method": "ngram", "num": 3}', "unknown key 'num'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "from 1 to 64"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "from 1 to 64"),
        ('{"method": "ngram", "num_speculative_tokens": 2.0}', "from 1 to 64"),
        ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}', "from 5 to 64"),
        ('{"method": "suffix", "max_cached_tokens": 3}', "max_cached_tokens"),
        ('{"method": "draft_model"}', "model of --speculative-config is None"),
        ('{"model": ""}', "model of --speculative-config is ''"),
        ('{"method": "ngram", "model": "small"}', "absent with the method ngram"),
    ],
)
def test_bad_values_name_the_key(given: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EngineConfig(model="m", speculative_config=given)


def test_every_sequence_of_a_step_has_room_for_its_drafts() -> None:
    config = EngineConfig(
        model="m",
        speculative_config={"method": "ngram"},
        max_num_seqs=8,
        max_num_batched_tokens=32,
    )

    assert config.max_drafts == 3
    assert EngineConfig(model="m").max_drafts == 0
