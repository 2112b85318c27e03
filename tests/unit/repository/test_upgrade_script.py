"""The order in which `deploy/compose/upgrade.sh` replaces containers, with stand-ins for Docker."""

import os
import subprocess

import pytest

from tests.support.pages import ROOT

DOCKER = """#!/bin/sh
case "$*" in
    inspect*) echo project ;;
    *service=router-2*) printf '%s' "$ROUTER_2" ;;
    *health=healthy*) printf 'old\\nnew\\n' ;;
    ps*) echo old ;;
esac
"""
COMPOSE = """#!/bin/sh
case "$1" in
    ps) echo old ;;
    up) for service; do :; done; echo "up $service" >> "$CALLS" ;;
esac
"""
SLEEP = """#!/bin/sh
echo "sleep $1" >> "$CALLS"
"""
WORKERS = ["up redis", "up prefill", "up decode"]


@pytest.mark.parametrize(
    ("router_2", "routers"),
    [
        # A client that found the second router closed tries it again after 2 s or less.
        ("old\n", ["up router-2", "sleep 5", "up router"]),
        ("", ["up router"]),
    ],
)
def test_clients_connect_to_the_second_router_before_the_first_is_replaced(
    tmp_path, router_2, routers
):
    for name, text in (("docker", DOCKER), ("compose", COMPOSE), ("sleep", SLEEP)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "ROUTER_2": router_2,
    }
    script = ROOT / "deploy" / "compose" / "upgrade.sh"
    subprocess.run([script, "compose"], env=environment, check=True, timeout=60)
    assert calls.read_text().splitlines() == [*WORKERS, *routers]
