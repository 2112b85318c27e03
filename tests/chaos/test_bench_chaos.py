"""`baton bench chaos` on real processes: killed, frozen and restarted ones lose no request."""

import json

import pytest

from baton.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SMALL = ("--routers=1", "--prefill=1", "--decode=2", "--num-requests=32")


def run(tmp_path, *flags):
    path = tmp_path / "chaos.json"
    status = main(["bench", "chaos", *SMALL, f"--json={path}", *flags])
    results = json.loads(path.read_text())
    assert results["verdicts"] == {"right": 32}, results["errors"]
    assert (status, results["left"]) == (0, [])
    return results


def test_killed_and_frozen_workers_and_router_processes_lose_no_request(tmp_path):
    flags = ("--routers=2", "--router-processes=2", "--kv-connector=grpc://", "--seed=8")
    flags += ("--target=prefill", "--target=decode", "--target=router", "--event-interval-s=1.9")
    results = run(tmp_path, *flags)
    targets = {target for _, _, target in results["events"]}
    assert {target.partition("-")[0] for target in targets} == {"decode", "prefill", "router"}


def test_restarted_workers_lose_no_request_and_their_kv_is_not_computed_again(tmp_path):
    flags = ("--target=decode", "--rolling=1", "--request-rate=2", "--kv-connector=shm://")
    results = run(tmp_path, *flags)
    assert [target for _, _, target in results["events"]] == ["decode-0", "decode-1"]
    assert results["computed"] < 1.1
