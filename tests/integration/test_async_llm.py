"""`AsyncLLM` on a tiny checkpoint: streams, their ends, and errors."""

import asyncio
import contextlib
import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from baton import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from baton.common.errors import (
    AlreadyExistsError,
    ConfigurationError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from baton.offline import async_llm
from baton.offline.request import OfflineRequest
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=150)
ARGUMENTS = {"dtype": "float32", "max_model_len": 200, "num_threads": 1, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def path():
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def llm(path):
    args = AsyncEngineArgs(str(path), **ARGUMENTS, disable_log_stats=True)
    with AsyncLLM.from_engine_args(args) as made:
        yield made


async def results_of(stream):
    return [result async for result in stream]


async def until_idle(llm):
    """Waits until the engine has no requests."""
    await asyncio.wait_for(llm._engine._idle.wait(), 20)


async def test_results_grow_to_those_of_transformers(llm, path):
    prompt = prompt_of(20, seed=1)
    results = await results_of(llm.generate(prompt, GREEDY, "mine"))
    last = results[-1]
    assert last.token_ids == reference_greedy(path, prompt, 12)
    assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
    assert (last.request_id, last.finish_reason) == ("mine", "length")
    assert last.prompt_token_ids == prompt
    assert last.usage.completion_tokens == 12
    for earlier, later in pairwise(results):
        assert later.text.startswith(earlier.text)
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        assert not earlier.outputs[0].finished()


async def test_deltas_of_candidates_join_to_the_whole(llm):
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=10, n=2, logprobs=1)
    whole = (await results_of(llm.generate("Hello", params)))[-1]
    deltas = await results_of(
        llm.generate("Hello", replace(params, output_kind=RequestOutputKind.DELTA))
    )
    for index, expected in enumerate(whole.outputs):
        own = [output for delta in deltas for output in delta.outputs if output.index == index]
        assert "".join(output.text for output in own) == expected.text
        assert [token for output in own for token in output.token_ids] == expected.token_ids
        assert [each for output in own for each in output.logprobs] == expected.logprobs
        assert [output.finish_reason for output in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == expected.finish_reason
    assert deltas[-1].finished


async def test_only_the_final_result_is_yielded_if_asked_for(llm):
    params = replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
    (result,) = await results_of(llm.generate({"prompt": "Hello"}, params))
    assert (len(result.token_ids), result.finished, result.prompt) == (12, True, "Hello")


async def test_requests_run_together(llm):
    streams = [results_of(llm.generate(f"prompt {i}", GREEDY)) for i in range(6)]
    for results in await asyncio.gather(*streams):
        assert len(results[-1].token_ids) == 12
    await until_idle(llm)


async def test_a_stop_text_ends_the_request(llm):
    whole = (await results_of(llm.generate("Hello", LONG)))[-1].text
    stop = next(text for text in whole if text.isascii() and text.isprintable())
    last = (await results_of(llm.generate("Hello", replace(LONG, stop=stop))))[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert last.text == whole[: whole.index(stop)]
    await until_idle(llm)


async def test_leaving_the_loop_aborts_the_request(llm):
    async with contextlib.aclosing(llm.generate("Hello", LONG)) as stream:
        async for result in stream:
            assert not result.finished
            break
        assert llm._engine.request_ids
    assert not llm._engine.request_ids
    async for _ in llm.generate("Hello", LONG):
        break
    await until_idle(llm)


async def test_cancelling_the_reader_aborts_the_request(llm):
    started = asyncio.Event()

    async def read():
        async for _ in llm.generate("Hello", LONG):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not llm._engine.request_ids


async def test_an_aborted_request_ends_with_abort(llm):
    results = []
    async for result in llm.generate("Hello", LONG, "mine"):
        results.append(result)
        await llm.abort("mine")
    assert results[-1].finished
    assert results[-1].finish_reason == "abort"
    await llm.abort(["unknown", "mine"])


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_an_abort_while_a_text_is_tokenized_ends_the_request(llm, monkeypatch, kind):
    loop, is_making, may_go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    make = llm._model.make_request

    def make_later(*arguments, **fields):
        loop.call_soon_threadsafe(is_making.set)
        assert may_go_on.wait(20)
        return make(*arguments, **fields)

    monkeypatch.setattr(llm._model, "make_request", make_later)
    monkeypatch.setattr(async_llm, "MAX_INLINE_LENGTH", 2)
    params = replace(GREEDY, n=2, temperature=1, output_kind=kind)
    reading = asyncio.create_task(results_of(llm.generate("Hello", params, "mine")))
    await asyncio.wait_for(is_making.wait(), 20)
    await llm.abort(name for name in ("other", "mine"))
    may_go_on.set()
    (result,) = await asyncio.wait_for(reading, 20)
    assert result.finished
    assert [one.finish_reason for one in result.outputs] == ["abort"] * 2
    assert [(one.text, list(one.token_ids)) for one in result.outputs] == [("", [])] * 2
    assert not llm._unsent


async def test_the_deadline_ends_the_generator(llm):
    with pytest.raises(DeadlineExceededError):
        await results_of(llm.generate("Hello", LONG, timeout_s=1e-3))
    await until_idle(llm)


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("", {}, "empty"),
        ([5, 2**20], {}, "token_ids"),
        ({"text": "a"}, {}, "'text'"),
        ("a", {"lora_request": object()}, "lora_request"),
    ],
)
async def test_bad_requests_are_refused(llm, prompt, fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        await results_of(llm.generate(prompt, GREEDY, **fields))


async def test_the_id_of_a_running_request_is_refused(llm):
    async with contextlib.aclosing(llm.generate("Hello", LONG, "mine")) as stream:
        await anext(stream)
        with pytest.raises(AlreadyExistsError, match="request_id"):
            await results_of(llm.generate("Hello", LONG, "mine"))


async def test_a_seed_repeats_the_draws(path):
    texts = []
    params = {"temperature": 1.5, "ignore_eos": True}
    for _ in range(2):
        with AsyncLLM(str(path), seed=5, **ARGUMENTS) as made:
            streams = [made.generate("Hello", params), made.generate("Hello", params)]
            texts.append([(await results_of(stream))[-1].token_ids for stream in streams])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


async def test_shutdown_ends_the_generators(path):
    made = AsyncLLM(str(path), **ARGUMENTS)
    stream = made.generate("Hello", LONG)
    await anext(stream)
    made.shutdown()
    made.shutdown()
    with pytest.raises(UnavailableError):
        await results_of(stream)
    with pytest.raises(UnavailableError, match="shut down"):
        await results_of(made.generate("Hello"))


async def test_a_failed_engine_ends_the_generators(path, monkeypatch):
    with AsyncLLM(str(path), **ARGUMENTS) as made:
        stream = made.generate("Hello", LONG)
        await anext(stream)

        def failing(on_outputs):
            raise MemoryError

        monkeypatch.setattr(made._core, "run_step", failing)
        with pytest.raises(UnavailableError):
            await results_of(stream)


async def test_a_second_event_loop_is_refused(path):
    with AsyncLLM(str(path), **ARGUMENTS) as made:
        results = await asyncio.to_thread(asyncio.run, results_of(made.generate("Hello", GREEDY)))
        assert results[-1].finished
        with pytest.raises(FailedPreconditionError, match="event loop"):
            await results_of(made.generate("Hello", GREEDY))


async def test_the_tokenizer_and_the_defaults_are_those_of_the_model(llm):
    tokenizer = await llm.get_tokenizer()
    assert tokenizer.encode("ab") == list(b"ab")
    assert llm.get_default_sampling_params() == SamplingParams()
    assert await llm.reset_prefix_cache() >= 0


async def test_bad_arguments_are_refused(path):
    with pytest.raises(ConfigurationError, match="data_parallel_size is 2; it must be 1"):
        AsyncLLM(str(path), data_parallel_size=2)


async def test_an_output_that_cannot_be_read_ends_its_request_alone(llm, monkeypatch, caplog):
    def fail(request, output):
        raise TypeError("a bug")

    monkeypatch.setattr(OfflineRequest, "add", fail)
    with pytest.raises(InternalError, match="could not be read"):
        await asyncio.wait_for(results_of(llm.generate([1, 2], GREEDY)), 20)
    monkeypatch.undo()
    assert "was lost" in caplog.text
    assert (await results_of(llm.generate([1, 2], GREEDY)))[-1].finished
