"""A scripted `GenerationService` on a free port, for tests of clients."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Answers every prompt with "Hello, world"; some prompts make it misbehave.

    A request for n candidates gets all of them in alternating messages, with scores. A request
    of several prompts gets "Hello" and the prompt's number for each.

    "fail": RESOURCE_EXHAUSTED. "truncate": the stream ends early; with several
    candidates, after all but the last have ended. "hang": the
    stream stays open after its first message; `cancelled` is set when the
    client disconnects.
    """

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[object] = []
        self.cancelled = threading.Event()

    def Generate(self, request, context):
        self.requests.append(request)
        if request.text == "fail":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        own_id = request.request_id or "made-up"
        if request.WhichOneof("prompt") == "prompts":
            numbers = range(len(request.prompts.prompts))
            return generation_pb2.GenerateResponse(
                request_id=own_id,
                responses=[self._response(f"{own_id}-{number}") for number in numbers],
            )
        return self._response(own_id)

    def _response(self, request_id):
        return generation_pb2.GenerateResponse(
            request_id=request_id,
            completions=[
                generation_pb2.Completion(
                    index=0,
                    token_ids=[5, 6, 7],
                    text="Hello, world",
                    finish_reason=common_pb2.FINISH_REASON_STOP,
                    matched_stop=common_pb2.MatchedStop(token_id=7),
                )
            ],
            usage=_usage(),
            timings=_timings(),
        )

    def GenerateStream(self, request, context):
        self.requests.append(request)
        if request.text == "hang":
            context.add_callback(self.cancelled.set)
        if request.WhichOneof("prompt") == "prompts":
            yield from _prompts(request.prompts.prompts)
            return
        if request.sampling.n > 1:
            is_whole = request.text != "truncate"
            yield from list(_candidates(request.sampling.n))[: None if is_whole else -1]
            return
        yield _with_logprobs(
            request,
            generation_pb2.GenerateStreamResponse(request_id="r", token_ids=[5], text="Hello"),
            prompt=[3, 4],
        )
        if request.text == "hang":
            self.cancelled.wait(30)
            return
        if request.text == "truncate":
            return
        if request.text == "fail":
            context.abort(grpc.StatusCode.UNAVAILABLE, "no replica is left")
        last = generation_pb2.GenerateStreamResponse(
            request_id="r",
            token_ids=[6, 7],
            text=", world",
            finish_reason=common_pb2.FINISH_REASON_STOP,
            matched_stop=common_pb2.MatchedStop(text="!"),
            usage=_usage(),
            timings=_timings(),
        )
        yield _with_logprobs(request, last)

    def Tokenize(self, request, context):
        ids = [ord(character) for character in request.text]
        return generation_pb2.TokenizeResponse(
            token_ids=[1, *ids] if request.add_special_tokens else ids
        )

    def Detokenize(self, request, context):
        return generation_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def GetModel(self, request, context):
        return generation_pb2.GetModelResponse(
            model="fake",
            max_model_len=64,
            vocab_size=300,
            eos_token_ids=[2],
            block_size=16,
            kv_namespace="abc",
        )


def _prompts(prompts):
    """One message per prompt, which is the last one; a prompt "truncate" has none."""
    for index, prompt in enumerate(prompts):
        if prompt.text != "truncate":
            yield generation_pb2.GenerateStreamResponse(
                request_id=f"r-{index}",
                prompt_index=index,
                token_ids=[5],
                text=f"Hello {index}",
                finish_reason=common_pb2.FINISH_REASON_LENGTH,
                usage=_usage(),
                timings=_timings(),
            )


def _candidates(n):
    for index in range(n):
        yield generation_pb2.GenerateStreamResponse(
            request_id="r", index=index, token_ids=[5], text=f"Hello {index}"
        )
    for index in range(n):
        last = index == n - 1
        yield generation_pb2.GenerateStreamResponse(
            request_id="r",
            index=index,
            token_ids=[6],
            text="!",
            finish_reason=common_pb2.FINISH_REASON_LENGTH,
            score=-0.5 - index,
            usage=_usage() if last else None,
            timings=_timings() if last else None,
        )


def _with_logprobs(request, message, prompt=()):
    """Adds the log-probabilities that the request asks for."""
    if request.sampling.HasField("logprobs"):
        message.logprobs.extend(map(_logprobs, message.token_ids))
    if request.sampling.HasField("prompt_logprobs"):
        message.prompt_token_ids.extend(prompt)
        message.prompt_logprobs.extend(map(_logprobs, prompt[1:]))
    return message


def _logprobs(token_id):
    return common_pb2.TokenLogprobs(
        logprob=-token_id / 4, rank=token_id, top_token_ids=[9, 6], top_logprobs=[-0.5, -1.5]
    )


def _usage():
    return common_pb2.Usage(prompt_tokens=4, cached_tokens=2, completion_tokens=3)


def _timings():
    return common_pb2.Timings(route_ms=1.5, first_token_ms=20.0, total_ms=30.0)


@contextmanager
def running_fake_generation() -> Iterator[FakeGeneration]:
    """Serves until the block ends."""
    fake = FakeGeneration()
    server = grpc.server(ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fake
    finally:
        fake.cancelled.set()
        server.stop(0).wait()
