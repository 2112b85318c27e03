"""OpenAI's files and batches over a real router: its client, tenants, refusals, a killed router."""

import asyncio
import json
import os
import sys
from collections import Counter
from contextlib import asynccontextmanager

import httpx2
import openai
import pytest

from router.batches.requests import BATCH_PRIORITY
from router.config.security import RouterSecurityConfig
from router.config.tenants import TenantsConfig
from tests.support.batches import ENDPOINT, HOUR_S, ids_of, input_line, input_of
from tests.support.fake_workers import MODEL, FakeDecode, running_workers
from tests.support.running_http import running_http
from tests.support.tenants import KEY, OTHER_KEY, entry_of, write_tenants
from tests.support.tokenizer_folders import write_byte_level_folder

SCRIPT = [300] * 9


def running_batches(folder, decode, **config):
    return running_http(decode, http={"batch_folder": str(folder / "batches")}, **config)


async def upload(client, content: bytes):
    return await client.files.create(file=("in.jsonl", content), purpose="batch")


async def create(client, file_id: str, **fields):
    fields = {"endpoint": ENDPOINT, "completion_window": "24h"} | fields
    return await client.batches.create(input_file_id=file_id, **fields)


async def ended(client, batch):
    async with asyncio.timeout(30):
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


def lines_of(content) -> list[dict]:
    return list(map(json.loads, content.content.splitlines()))


async def test_a_batch_through_openais_client(tmp_path):
    decode = FakeDecode(SCRIPT)
    bad = input_line("bad", body={"prompt": "Hi", "max_tokens": -1})
    content = input_of(["a", "b"]) + json.dumps(bad).encode()
    async with running_batches(tmp_path, decode) as api:
        client = api.openai
        file = await upload(client, content)
        assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
        assert (await client.files.content(file.id)).content == content
        batch = await create(client, file.id, metadata={"of": "a test"})
        assert (batch.status, batch.metadata) == ("validating", {"of": "a test"})
        batch = await ended(client, batch)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
        answers = lines_of(await client.files.content(batch.output_file_id))
        errors = lines_of(await client.files.content(batch.error_file_id))
        listed = [each.id async for each in client.files.list(limit=2)]
        assert set(listed) == {file.id, batch.output_file_id, batch.error_file_id}
        assert [each.id async for each in client.batches.list()] == [batch.id]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError) as refusal:
            await client.files.retrieve(file.id)
        assert (refusal.value.param, refusal.value.code) == ("file_id", None)
        (lost,) = tmp_path.rglob(f"{batch.output_file_id}.jsonl")
        lost.unlink()
        with pytest.raises(openai.NotFoundError, match=f"content of {lost.stem} is lost"):
            await client.files.content(lost.stem)
    assert sorted(ids_of(answers)) == ["a", "b"]
    for answer in answers:
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["usage"]["completion_tokens"] == 2
    assert ids_of(errors) == ["bad"]
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["response"]["body"]["error"]["param"] == "max_tokens"
    assert {start.spec.priority for start in decode.starts} == {BATCH_PRIORITY}


async def test_a_batch_is_cancelled_while_its_requests_run(tmp_path):
    decode = FakeDecode(SCRIPT, pause_after=1)
    async with running_batches(tmp_path, decode) as api:
        file = await upload(api.openai, input_of(["a", "b"]))
        batch = await create(api.openai, file.id)
        await decode.changes.until(lambda: len(decode.starts) == 2)
        assert (await api.openai.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(api.openai, batch)
        errors = lines_of(await api.openai.files.content(batch.error_file_id))
        await decode.changes.until(lambda: not decode.running)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at
    assert batch.output_file_id is None
    assert [each["error"]["code"] for each in errors] == ["batch_cancelled"] * 2


async def test_a_request_may_take_longer_than_those_of_clients(tmp_path):
    decode = FakeDecode(SCRIPT, pause_after=1)
    async with running_batches(tmp_path, decode, default_timeout_s=0.5) as api:
        file = await upload(api.openai, input_of(["a"]))
        batch = await create(api.openai, file.id)
        await decode.changes.until(lambda: decode.starts)
        body = {"prompt": [72], "max_tokens": 2}
        assert (await api.http.post(ENDPOINT, json=body)).status_code == 504
        decode.resume()
        batch = await ended(api.openai, batch)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    assert [start.spec.priority for start in decode.starts].count(BATCH_PRIORITY) == 1


async def test_beside_clients_who_wait_few_requests_run(tmp_path):
    decode = FakeDecode(SCRIPT, pause_after=1, max_num_seqs=32)
    async with running_batches(tmp_path, decode) as api:
        file = await upload(api.openai, input_of(map(str, range(40))))
        await create(api.openai, file.id)
        await decode.changes.until(lambda: len(decode.starts) == 16)
        assert api.router.service.batch_places() == 16
        body = {"prompt": [72], "max_tokens": 2}
        waiting = asyncio.create_task(api.http.post(ENDPOINT, json=body))
        await decode.changes.until(lambda: len(decode.starts) == 17)
        assert api.router.service.batch_places() == 1
        decode.resume()
        assert (await waiting).status_code == 200
        assert api.router.service.batch_places() == 1  # another request may come soon


async def test_the_waits_of_a_batch_are_not_those_of_clients(tmp_path):
    decode = FakeDecode(SCRIPT)
    async with running_batches(tmp_path, decode) as api:
        backlog = api.router.model._backlog
        file = await upload(api.openai, input_of("ab"))
        assert (await ended(api.openai, await create(api.openai, file.id))).status == "completed"
        assert backlog._wait_s.value == backlog._first_s.value == 0
        await api.http.post(ENDPOINT, json={"prompt": [72], "max_tokens": 2})
        assert backlog._wait_s.value > 0


async def test_a_stopping_router_leaves_its_batch_to_the_next_one(tmp_path):
    decode = FakeDecode(SCRIPT, pause_after=1)
    async with running_batches(tmp_path, decode) as api:
        file = await upload(api.openai, input_of(["a", "b"]))
        batch = await create(api.openai, file.id)
        await decode.changes.until(lambda: len(decode.starts) == 2)
        await api.router.service.drain(20)
        await decode.changes.until(lambda: not decode.running)
    decode = FakeDecode(SCRIPT)
    async with running_batches(tmp_path, decode) as api:
        batch = await ended(api.openai, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)


async def test_clients_see_only_their_own_and_their_limits_hold(tmp_path):
    path = write_tenants(
        tmp_path, entry_of("a", KEY, max_concurrent_requests=1), entry_of("b", OTHER_KEY)
    )
    security = RouterSecurityConfig(tenants=TenantsConfig(tenants=path))
    decode = FakeDecode(SCRIPT)
    async with running_batches(tmp_path, decode, security=security) as api:
        client = api.openai.with_options(api_key=KEY)
        other = api.openai.with_options(api_key=OTHER_KEY)
        file = await upload(client, input_of([str(i) for i in range(3)]))
        with pytest.raises(openai.NotFoundError):
            await create(other, file.id)
        batch = await create(client, file.id)
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        assert not (await other.batches.list()).data
        assert not (await other.files.list()).data
        with pytest.raises(openai.AuthenticationError):
            await api.openai.files.list()
        batch = await ended(client, batch)
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)


BAD_BATCHES = [
    ({"endpoint": "/v1/embeddings"}, "endpoint"),
    ({"completion_window": "0h"}, "completion_window"),
    ({"completion_window": "8d"}, "completion_window"),
    ({"metadata": {"k": 5}}, "metadata"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
        "output_expires_after.seconds",
    ),
    (
        {"output_expires_after": {"anchor": "never", "seconds": HOUR_S}},
        "output_expires_after.anchor",
    ),
]


async def test_a_bad_batch_is_refused_with_its_field(tmp_path):
    async with running_batches(tmp_path, FakeDecode(SCRIPT)) as api:
        file = await upload(api.openai, input_of("a"))
        for fields, param in BAD_BATCHES:
            with pytest.raises(openai.BadRequestError) as refusal:
                await create(api.openai, file.id, **fields)
            assert refusal.value.param == param


async def test_bad_files_and_lists_are_refused(tmp_path):
    async with running_batches(tmp_path, FakeDecode(SCRIPT)) as api:
        content = {"file": ("in.jsonl", b"{}")}
        for data, files, param in (
            ({"purpose": "vision"}, content, "purpose"),
            ({}, content, "purpose"),
            ({"purpose": "batch"}, {"other": ("x", b"")}, "file"),
            ({"purpose": "batch", "expires_after[seconds]": "9999"}, content, "expires_after"),
            (
                {
                    "purpose": "batch",
                    "expires_after[anchor]": "created_at",
                    "expires_after[seconds]": "1",
                },
                content,
                "expires_after",
            ),
        ):
            answer = await api.http.post("/v1/files", data=data, files=files)
            assert answer.status_code == 400, data
            assert param in answer.json()["error"]["param"]
        assert (await api.http.post("/v1/files", json={})).status_code == 400
        assert (await api.http.post("/v1/batches", data={"a": "b"})).status_code == 415
        for query in ("limit=0", "limit=101", "after=batch_x"):
            answer = await api.http.get(f"/v1/batches?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                query.partition("=")[0],
            )
        for file_id in ("file-x", "..%2f..%2fqueue"):
            assert (await api.http.get(f"/v1/files/{file_id}")).status_code == 404


async def test_a_page_of_another_origin_sends_no_file(tmp_path):
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"{}")}}
    allowed = "https://allowed.test"
    http = {"batch_folder": str(tmp_path / "batches"), "allowed_origins": (allowed,)}
    async with running_http(FakeDecode(SCRIPT), http=http) as api:
        own = f"http://{api.http.base_url.netloc.decode()}"
        for origin, status in (
            ("https://other.test", 403),
            ("null", 403),
            (allowed, 200),
            (own, 200),
        ):
            answer = await api.http.post("/v1/files", headers={"Origin": origin}, **form)
            assert answer.status_code == status, answer.text
        assert len((await api.openai.files.list()).data) == 2


async def test_without_a_folder_there_are_none():
    async with running_http(FakeDecode(SCRIPT)) as api:
        for method, path in (("POST", "/v1/files"), ("GET", "/v1/batches")):
            answer = await api.http.request(method, path, json={})
            assert answer.status_code == 404


@asynccontextmanager
async def router_process(folder, decode):
    """A router as a process, which is killed at the end, and a client of it."""
    port_file = folder / "port"
    port_file.unlink(missing_ok=True)
    flags = ("--port", "0", "--port-file", str(port_file), "--grpc-port", "none")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--model", str(folder / MODEL), *flags),
        *("--decode", decode.address, "--batch-folder", str(folder / "batches")),
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(60):
            while not port_file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.05)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}/v1"
        async with httpx2.AsyncClient(verify=False, timeout=30) as http:
            yield openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http)
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
async def test_a_killed_router_answers_no_request_twice(tmp_path):
    write_byte_level_folder(tmp_path / MODEL)
    decode = FakeDecode(SCRIPT, pause_after=1)
    quick = [input_line(f"quick-{i}", body={"prompt": [i + 2], "max_tokens": 1}) for i in range(9)]
    slow = [input_line(f"slow-{i}", body={"prompt": [i + 50], "max_tokens": 2}) for i in range(9)]
    content = "\n".join(map(json.dumps, [*slow, *quick])).encode()
    async with running_workers(decode):
        async with router_process(tmp_path, decode) as client:
            batch = await create(client, (await upload(client, content)).id)
            async with asyncio.timeout(30):
                while batch.request_counts.completed < len(quick):
                    await asyncio.sleep(0.05)
                    batch = await client.batches.retrieve(batch.id)
        await decode.changes.until(lambda: not decode.running)
        decode.resume()
        async with router_process(tmp_path, decode) as client:
            batch = await ended(client, batch)
            answers = lines_of(await client.files.content(batch.output_file_id))
    assert batch.status == "completed"
    assert Counter(ids_of(answers)) == Counter(ids_of([*quick, *slow]))
    prompts = Counter(start.spec.prompt_token_ids[-1] for start in decode.starts)
    assert prompts == Counter({**{i + 2: 1 for i in range(9)}, **{i + 50: 2 for i in range(9)}})
