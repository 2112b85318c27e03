"""Events of Anthropic's API add up to the whole message, for any answer, as the official client
adds them up."""

from anthropic._models import construct_type
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings

from router.http.anthropic import MessageAnswer, MessageStream
from tests.support.answer_chunks import answers, check_type


def new_answer():
    return MessageAnswer("m", new_id=lambda: "msg_1")


def streamed(chunks):
    stream = MessageStream(new_answer())
    return [event for each in chunks for event in stream.push(each)] + stream.finish()


def whole(chunks):
    answer = new_answer()
    for each in chunks:
        answer.push(each)
    answer.finish()
    return answer.body()


@settings(deadline=None, max_examples=50)
@given(answers())
def test_the_client_adds_up_the_whole_message(chunks):
    snapshot, buffers = None, {}
    for event in streamed(chunks):
        if event["type"] == "ping":
            continue
        parsed = construct_type(type_=RawMessageStreamEvent, value=event)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    message = check_type(Message, whole(chunks))
    assert snapshot.to_dict(exclude_none=True) == message.to_dict(exclude_none=True)


@settings(deadline=None, max_examples=50)
@given(answers())
def test_blocks_are_numbered_and_follow_each_other(chunks):
    num_blocks, is_open = 0, False
    kinds = [event["type"] for event in streamed(chunks)]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    for event in streamed(chunks)[2:-2]:
        check_type(RawMessageStreamEvent, event)
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == num_blocks
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == num_blocks
            case "content_block_stop":
                assert is_open
                assert event["index"] == num_blocks
                is_open, num_blocks = False, num_blocks + 1
    assert not is_open
    assert num_blocks == len(whole(chunks)["content"])
