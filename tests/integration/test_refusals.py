"""Each refusal in the table of generation.proto is met, and is what the table says."""

from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from baton.common.errors import Reason, ResourceExhaustedError
from router.http.errors import problem_of
from rpc.errors import DOMAIN, from_rpc_error
from tests.support.fake_workers import MODEL, FakeDecode
from tests.support.refusals import REFUSALS, SCRIPT, router_of
from tests.support.running_http import running_http
from tests.support.running_router import failed_call, request

PROTO = Path(__file__).parents[2] / "protos" / "baton" / "v1" / "generation.proto"
COLUMNS = ["code", "reason", "field", "retry", "HTTP", "when"]


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    code: str
    reason: str
    field: str
    retry: str
    http: str
    when: str


def table() -> list[Row]:
    lines = [line[4:] for line in PROTO.read_text().splitlines() if line.startswith("// |")]
    head, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert head == COLUMNS
    return [Row(*row) for row in rows]


ROWS = table()


def test_the_table_has_all_reasons_and_each_is_met():
    keys = [(row.code, row.reason) for row in ROWS]
    assert len(set(keys)) == len(keys)
    assert set(keys) == REFUSALS.keys()
    assert {row.reason for row in ROWS} - {row.code for row in ROWS} == set(Reason)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.reason.lower())
async def test_a_refusal_is_what_the_table_says(row, tmp_path, monkeypatch):
    error, named_field = await REFUSALS[row.code, row.reason](tmp_path, monkeypatch)
    assert error.code() is grpc.StatusCode[row.code], error.details()
    assert len(error.details()) < 1200
    trailers = dict(error.trailing_metadata())
    assert trailers_bytes(error) < 4000

    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    info = detail_of(status, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == (DOMAIN, row.reason)

    request = detail_of(status, error_details_pb2.BadRequest)
    field = named_field or (None if row.field == "-" else row.field)
    assert (row.field == "-") == (field is None)
    assert field == (request and request.field_violations[0].field)
    check_retry(row, trailers, detail_of(status, error_details_pb2.RetryInfo))

    received = from_rpc_error(error)
    assert (received.code, received.reason, received.field) == (row.code, row.reason, field)
    assert problem_of(received, "r").status == int(row.http)


async def test_a_pool_that_is_too_small_is_no_matter_of_load():
    """A worker finds out that several candidates do not fit; no retry would help."""
    decode = FakeDecode(SCRIPT)
    decode.refusal = ResourceExhaustedError("too large", reason=Reason.NO_REPLICA_FITS)
    message = request()
    message.sampling.n = 2
    async with router_of(decode) as router:
        error = await failed_call(router.generate(message))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert from_rpc_error(error).reason == Reason.NO_REPLICA_FITS


async def test_a_used_id_is_a_conflict_over_http():
    decode = FakeDecode(SCRIPT, pause_after=1)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 9, "request_id": "mine", "stream": True}
    async with (
        running_http(decode) as api,
        api.http.stream("POST", "/v1/completions", json=body) as running,
    ):
        await anext(running.aiter_lines())
        answer = await api.http.post("/v1/completions", json=body)
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("request_id_in_use", "request_id")


def check_retry(row, trailers, retry):
    """Compares the times of a retry in all places."""
    pushback = trailers.get("grpc-retry-pushback-ms")
    if row.retry != "after":
        assert retry is None
        assert pushback == {"never": "-1", "-": None}[row.retry]
        return
    assert int(pushback) == retry.retry_delay.ToMilliseconds() > 0
    assert trailers["retry-after-ms"] == pushback


def detail_of(status, kind):
    """The detail of a kind; None if there is none."""
    found = kind()
    return found if any(detail.Unpack(found) for detail in status.details) else None


def trailers_bytes(error):
    """About what the trailers take on the wire, where bytes are base64."""
    values = dict(error.trailing_metadata()).values()
    sizes = [len(value) * 4 // 3 if isinstance(value, bytes) else len(value) for value in values]
    return sum(sizes) + len(error.details())
