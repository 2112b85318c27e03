"""Placement of a recorded step's buffers: live buffers do not overlap and take little memory."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.native.recording import _Buffer, _place

ALIGNMENT = 64  # a cache line, and the widest vector


@st.composite
def buffers(draw):
    """Buffers of a step of some tens of commands."""
    lives = st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 700))
    return [
        _Buffer(address=index, num_bytes=num_bytes, first=first, last=first + length)
        for index, (first, length, num_bytes) in enumerate(draw(st.lists(lives, max_size=25)))
    ]


def are_alive_at_once(one, other):
    return one.first <= other.last and other.first <= one.last


def overlap(one, other):
    return one.offset < other.offset + other.num_bytes and other.offset < one.offset + one.num_bytes


def rounded_up(num_bytes):
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@settings(max_examples=300, deadline=None)
@given(buffers())
def test_buffers_alive_at_once_do_not_overlap(placed):
    size = _place(placed)
    for index, one in enumerate(placed):
        assert 0 <= one.offset <= size - one.num_bytes
        assert one.offset % ALIGNMENT == 0
        for other in placed[:index]:
            if one.num_bytes and other.num_bytes and are_alive_at_once(one, other):
                assert not overlap(one, other)


@settings(max_examples=300, deadline=None)
@given(buffers())
def test_the_arena_is_no_larger_than_all_buffers_and_no_smaller_than_those_alive(placed):
    size = _place(placed)
    assert size <= sum(rounded_up(buffer.num_bytes) for buffer in placed)
    for command in range(43):
        alive = [buffer for buffer in placed if buffer.first <= command <= buffer.last]
        assert size >= sum(buffer.num_bytes for buffer in alive)


def test_a_chain_of_equal_buffers_takes_the_space_of_two():
    """Each command reads what the one before wrote."""
    chain = [_Buffer(i, 4096, first=i, last=i + 1) for i in range(20)]
    assert _place(chain) == 2 * 4096
