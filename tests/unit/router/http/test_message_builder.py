"""Turns become messages; what a client writes in many pieces takes time in proportion."""

import time

import pytest

from router.http.message_builder import MessageBuilder


@pytest.mark.parametrize(
    ("pieces", "text"),
    [(["a"], "a"), (["a", "b"], "a\nb"), (["", "", "b", "", "c"], "b\n\nc"), (["a", ""], "a\n")],
)
def test_pieces_of_a_turn_are_its_lines(pieces: list[str], text: str):
    builder = MessageBuilder(joins_users=True)
    for piece in pieces:
        builder.add("user", piece)
    for piece in pieces:
        builder.add_answer(piece)
        builder.add_reasoning(piece)
    user, assistant = builder.messages
    assert user == {"role": "user", "content": text}
    assert assistant == {"role": "assistant", "content": text, "reasoning_content": text}


def test_a_turn_without_text_has_none_and_an_empty_one_is_empty():
    builder = MessageBuilder()
    builder.add_call("c", "f", "{}")
    builder.add("user", "")
    assistant, user = builder.messages
    assert assistant["content"] is None
    assert user["content"] == ""


def test_many_pieces_are_not_copied_for_each_of_them():
    builder = MessageBuilder(joins_users=True)
    piece = "a" * 500
    started = time.thread_time()
    for _ in range(30_000):
        builder.add("user", piece)
    (message,) = builder.messages
    assert len(message["content"]) == 30_000 * 501 - 1
    assert time.thread_time() - started < 2  # 15 s and more if it copies
