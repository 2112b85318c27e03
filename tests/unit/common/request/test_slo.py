"""`Slo`: objectives in headers."""

import pytest

from baton.common.errors import InvalidArgumentError
from baton.common.request.slo import NO_SLO, Slo


def test_headers_of_http_and_metadata_of_grpc_state_objectives():
    headers = [(b"host", b"a"), (b"x-slo-ttft-ms", b"250"), (b"x-slo-tpot-ms", b" 12.5 ")]
    assert Slo.from_headers(headers) == Slo(0.25, 0.0125)
    assert Slo.from_headers([("x-slo-tpot-ms", "40"), ("key-bin", b"\xff")]) == Slo(None, 0.04)
    assert Slo.from_headers([("traceparent", "x")]) is NO_SLO


@pytest.mark.parametrize("text", ["", "soon", "0", "-5", "nan", "inf", "1e999", "5 ms", "\xff"])
def test_a_bad_objective_is_refused_with_its_name(text):
    with pytest.raises(InvalidArgumentError, match=r"x-slo-ttft-ms is .*milliseconds") as caught:
        Slo.from_headers([(b"x-slo-ttft-ms", text.encode("latin-1"))])
    assert caught.value.field == "x-slo-ttft-ms"
