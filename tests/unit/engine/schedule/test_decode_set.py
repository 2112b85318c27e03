"""`DecodeSet`: the sequences that are due in each step."""

from engine.groups.group import Sequence, SequenceGroup
from engine.groups.states import GroupTimes
from engine.schedule.decode_set import DecodeSet
from kvstore.block_key import BlockKeyChain
from tests.support.requests import engine_request


def sequence(num_tokens: int, *, limit: int = 100, row: int = 0) -> Sequence:
    """Returns a sequence whose next step runs its last known token."""
    decode_request = engine_request(
        request_id="a", prompt_token_ids=(0,) * num_tokens, max_tokens=1
    )
    group = SequenceGroup(
        request=decode_request,
        order=(0.0, 0),
        keys=BlockKeyChain(b"", 4),
        max_len=limit,
        times=GroupTimes(0.0),
    )
    (branch,) = group.branches
    branch.num_scheduled = num_tokens
    branch.row = row
    return branch


def test_a_sequence_is_due_at_every_block_boundary() -> None:
    decoding = DecodeSet(4)
    one = sequence(6)
    decoding.enter(one, step=9)  # position 6 in step 10, so 8 in step 12
    due = []
    for step in range(10, 22):
        for each in decoding.take_due(step):
            due.append((step, decoding.position(each, step)))
            decoding.renew(each, step)

    assert due == [(10, 6), (12, 8), (16, 12), (20, 16)]


def test_a_sequence_is_due_after_it_draws_its_last_token() -> None:
    decoding = DecodeSet(4)
    one = sequence(8, limit=11)
    decoding.enter(one, step=0)
    assert decoding.take_due(1) == [one]
    decoding.renew(one, 1)

    # Position 9 draws the token at position 10, the last one below the limit.
    assert [decoding.take_due(step) for step in (2, 3)] == [[], [one]]
    assert decoding.position(one, 3) == 11 - 1


def test_a_sequence_that_has_left_is_not_due() -> None:
    decoding = DecodeSet(4)
    one = sequence(8)
    decoding.enter(one, step=0)

    assert decoding.leave(one)
    assert not decoding.leave(one)
    assert one not in decoding
    assert decoding.take_due(1) == []


def test_a_sequence_that_enters_again_is_due_once() -> None:
    decoding = DecodeSet(1)
    one = sequence(8)
    decoding.enter(one, step=0)
    decoding.leave(one)
    one.num_scheduled = 9
    decoding.enter(one, step=1)

    assert decoding.take_due(1) == []
    assert decoding.take_due(2) == [one]
    assert decoding.position(one, 2) == 9


def test_members_returns_the_same_objects_until_a_sequence_enters_or_leaves() -> None:
    decoding = DecodeSet(4)
    first, second = sequence(8, row=3), sequence(9, row=1)
    assert decoding.members(1) == ((), ())
    decoding.enter(first, step=0)
    decoding.enter(second, step=0)
    sequences, rows = decoding.members(1)

    assert (sequences, rows) == ((first, second), (3, 1))
    decoding.take_due(1)
    decoding.renew(first, 1)
    assert decoding.members(1)[0] is sequences
    decoding.leave(first)
    assert decoding.members(1) == ((second,), (1,))
    assert len(decoding) == 1


def test_members_returns_the_same_rows_after_a_sequence_enters_and_leaves() -> None:
    decoding = DecodeSet(4)
    first, second = sequence(8, row=3), sequence(9, row=1)
    decoding.enter(first, step=0)
    _, rows = decoding.members(1)
    decoding.enter(second, step=1)
    decoding.leave(second)

    assert decoding.members(1)[1] is rows


def test_lanes_share_sequences_and_steps() -> None:
    decoding = DecodeSet(4, num_lanes=3)
    entered = [sequence(6, row=row) for row in range(5)]
    for each in entered:
        decoding.enter(each, step=9)  # drew its token at position 6
    assert [decoding.members(step)[1] for step in (10, 11, 12)] == [(2,), (1, 4), (0, 3)]
    assert [decoding.num_in(step) for step in (10, 11, 12)] == [1, 2, 2]
    due = []
    for step in range(10, 32):
        for each in decoding.take_due(step):
            assert decoding.runs_in(each, step)
            due.append((step, each.row, decoding.position(each, step)))
            decoding.renew(each, step)
    assert [(step, position) for step, row, position in due if row == 1] == [
        (11, 6),
        (17, 8),
        (29, 12),
    ]
    assert [step for step, row, _ in due if row == 2] == [10, 16, 28]


def test_the_position_between_the_steps_of_a_lane_is_that_of_the_next_one() -> None:
    decoding = DecodeSet(4, num_lanes=3)
    one = sequence(6)
    decoding.enter(one, step=9)
    assert [decoding.position(one, step) for step in range(10, 17)] == [6, 6, 6, 7, 7, 7, 8]


def test_a_lane_that_was_empty_counts_the_time_since_the_newest_step() -> None:
    decoding = DecodeSet(4, num_lanes=2)
    assert decoding.commit(1, 100.0) == 0.0  # of no row: nothing has decoded before
    assert decoding.commit(2, 100.5) == 100.0
    assert decoding.commit(3, 101.0) == 100.0
    assert decoding.commit(7, 105.0) == 101.0  # 5 had no members
    one = sequence(6)
    decoding.enter(one, step=7)
    one.token_at = 105.0
    decoding.leave(one)
    assert one.token_at == 105.0


def test_a_sequence_that_enters_again_for_the_step_of_before_is_due_once() -> None:
    """Its states would get the token of that step twice otherwise."""
    decoding = DecodeSet(4)
    one = sequence(8)
    decoding.enter(one, step=0)
    (one,) = decoding.take_due(1)
    decoding.renew(one, 1)  # due in step 5
    decoding.leave(one)
    one.num_scheduled = 12
    decoding.enter(one, step=4)

    assert decoding.take_due(5) == [one]
