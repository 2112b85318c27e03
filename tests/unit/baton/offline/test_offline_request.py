"""`OfflineRequest`: ends of candidates whose text is of a given form."""

import pytest

from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from baton.offline.request import OfflineRequest
from engine.request import EngineOutput, FinishReason
from tests.support.running_router import script_of, tokenizer

EOS = 2


def finished(token_ids, num_first, **params):
    spec = RequestSpec(
        request_id="r",
        prompt_token_ids=(5, 6),
        params=SamplingParams(**params),
        stop_token_ids=frozenset({EOS}),
    )
    request = OfflineRequest(spec, tokenizer())
    request.add(EngineOutput("r", token_ids=tuple(token_ids[:num_first])))
    request.add(
        EngineOutput(
            "r",
            token_ids=tuple(token_ids[num_first:]),
            finish_reason=FinishReason.STOP,
            is_last=True,
        )
    )
    return request.result().outputs[0]


@pytest.mark.parametrize("num_first", [1, 3])
@pytest.mark.parametrize("include", [False, True])
def test_a_complete_structured_output_ends_with_its_last_token(num_first, include):
    token_ids = script_of('{"a":"yes"}')
    params = {"include_stop_str_in_output": include}
    completion = finished(token_ids, num_first, **params)
    assert completion.text == '{"a":"yes"}'
    assert completion.token_ids == list(token_ids)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert finished(token_ids, len(token_ids), **params) == completion


def test_a_stop_token_is_matched_and_has_no_text():
    completion = finished([*script_of("yes"), EOS], 1)
    assert (completion.text, completion.stop_reason) == ("yes", EOS)
