"""Guides of sequences: masks, forced tokens, reasoning parts, and what preemption keeps."""

from dataclasses import replace

import pytest

from baton.common.errors import InternalError
from baton.common.request.request_spec import ReasoningMarks, ReasoningStart
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.guide import ReasoningPart
from tests.support.driven_scheduler import DrivenScheduler, request
from tests.support.fake_grammar import FakeGrammars, allowed_tokens

MARKS = ReasoningMarks((7, 8), (9, 9, 5))
OUTPUTS = StructuredOutputs(regex="." * 12)


def part(prompt=(), budget=None):
    return ReasoningPart(MARKS, budget, prompt)


@pytest.mark.parametrize(
    ("prompt", "is_over", "opening"),
    [
        ((), False, (7, 8)),
        ((1, 7, 1), False, (7, 8)),
        ((1, 7, 8), False, ()),
        ((1, 7, 8, 1, 1), False, ()),
        ((7, 8, 9, 9, 5), True, ()),
        ((9, 9, 5, 7, 8), False, ()),
        ((7, 8, 9, 9), False, ()),
        ((9, 9, 5), True, ()),
    ],
)
def test_the_last_mark_of_a_prompt_decides(prompt, is_over, opening):
    assert (part(prompt).is_over, part(prompt).opening) == (is_over, opening)


@pytest.mark.parametrize(
    ("start", "is_over", "opening"),
    [
        (ReasoningStart.INSIDE, False, ()),
        (ReasoningStart.AFTER, True, ()),
        (ReasoningStart.BEFORE, False, (7, 8)),
    ],
)
def test_a_stated_start_outweighs_marks_in_the_prompt(start, is_over, opening):
    for prompt in (), (7, 8, 1), (9, 9, 5, 1):
        tracked = ReasoningPart(replace(MARKS, start=start), None, prompt)
        assert (tracked.is_over, tracked.opening) == (is_over, opening)


def test_a_text_that_begins_otherwise_has_no_reasoning_part():
    tracked = part()
    assert tracked.accept(7) == ()
    assert tracked.opened == (7,)
    assert tracked.accept(1) == (7, 1)
    assert tracked.is_over


def test_the_end_mark_ends_the_part_however_it_is_begun():
    tracked = part((7, 8))
    for token in (9, 1, 9, 9, 9):
        tracked.accept(token)
        assert not tracked.is_over
    tracked.accept(5)
    assert tracked.is_over


@pytest.mark.parametrize("generated", [(), (1,), (9,), (1, 9), (9, 9), (9, 9, 9)])
def test_a_used_up_budget_completes_the_end_mark(generated):
    tracked = part((7, 8), budget=len(generated))
    for token in generated:
        assert tracked.required_token is None
        tracked.accept(token)
    appended = []
    while not tracked.is_over:
        appended.append(tracked.required_token)
        tracked.fork().accept(1)  # another candidate changes nothing here
        tracked.accept(appended[-1])
    assert (*generated, *appended)[-3:] == (9, 9, 5)
    assert len(appended) <= 3


@pytest.mark.parametrize("generated", [(), (1,), (9,), (9, 9), (9, 9, 9)])
def test_a_closed_part_completes_its_end_mark(generated):
    tracked = part((7, 8))
    for token in generated:
        tracked.accept(token)
    appended = [tracked.close()]
    tracked.accept(appended[0])
    while not tracked.is_over:
        appended.append(tracked.fork().required_token)
        tracked.accept(appended[-1])
    assert (*generated, *appended)[-3:] == (9, 9, 5)
    assert len(appended) <= 3


def constrained_scheduler(**config):
    driven = DrivenScheduler(**config)
    grammars = FakeGrammars()
    driven.scheduler._guides._grammars = grammars
    return driven, grammars


def test_a_root_that_is_preempted_keeps_its_guide():
    driven, grammars = constrained_scheduler()
    driven.add(request("a", n=2, max_tokens=1, structured_outputs=OUTPUTS))
    grammars.end_one()
    assert driven.scheduler.take_compiled() == []
    group = driven.scheduler._groups["a"]
    guide = group.root.guide
    group.make_root()  # as after a preemption before its first token
    assert group.root.guide is guide is not None
    drawn = [output.token_ids for output in driven.step()]
    assert len(drawn) == 2
    assert {token for (token,) in drawn} <= allowed_tokens(OUTPUTS, ())


def test_a_bug_of_the_compiler_ends_its_request_alone(caplog):
    driven, grammars = constrained_scheduler()
    driven.add(request("a", structured_outputs=OUTPUTS), request("b"))
    grammars.end_one(KeyError("secret"))
    (output,) = driven.scheduler.take_compiled()
    assert (output.request_id, output.is_last) == ("a", True)
    assert isinstance(output.error, InternalError)
    assert "secret" not in output.error.message
    assert "the grammar of a was not compiled" in caplog.text
    assert set(driven.scheduler._groups) == {"b"}


def test_a_request_takes_its_place_in_the_queue_once_its_grammar_is_compiled():
    driven, grammars = constrained_scheduler(max_num_seqs=1)
    driven.add(request("a", structured_outputs=OUTPUTS), request("b"))
    assert driven.scheduler.load().num_waiting == 2
    grammars.end_one()
    driven.scheduler.take_compiled()
    driven.step()
    assert set(driven.shares) == {"a"}  # it arrived first
