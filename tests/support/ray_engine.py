"""`python -m tests.support.ray_engine CONFIG`: an engine whose ranks are Ray actors.

Prints the tokens of two requests, and what is left in the cluster. With "--kill", its second rank
is killed between them.
"""

import json
import os
import signal
import sys
import time
from contextlib import closing
from typing import Any

import ray
from ray._private import state

from engine.config import EngineConfig
from engine.loop.build import build_engine
from engine.loop.core import EngineCore
from kernels.ranks import RanksLostError
from tests.support.checkpoints import prompt_of
from tests.support.real_engines import run_all, tokens_of
from tests.support.requests import engine_request


def tokens(core: EngineCore, request_id: str) -> list[int]:
    """Computes a request."""
    request = engine_request(request_id, tuple(prompt_of(21)), max_tokens=20)
    return tokens_of(run_all(core, [request])[request_id])


def actors(*states: str) -> list[dict[str, Any]]:
    """Returns the actors of the cluster in these states."""
    return [each for each in state.actors().values() if each["State"] in states]


def left_in_cluster() -> list[str]:
    """Waits until the cluster has all its CPUs and no actor; returns what is left."""
    give_up_at = time.monotonic() + 60
    while True:
        left = [each["ActorClassName"] for each in actors("ALIVE", "RESTARTING")]
        num_cpus = ray.cluster_resources()["CPU"]
        if (num_free := ray.available_resources().get("CPU", 0.0)) != num_cpus:
            left.append(f"{num_cpus - num_free:g} CPUs")
        if not left or time.monotonic() > give_up_at:
            return left
        time.sleep(0.05)


def main() -> None:
    """Prints one JSON object."""
    config = EngineConfig(**json.loads(sys.argv[1]))
    found: dict[str, Any] = {}
    with closing(build_engine(config)) as core:
        found["first"] = tokens(core, "first")
        (rank,) = actors("ALIVE")
        own = ray.get_runtime_context().get_node_id()
        found["is_on_other_node"] = rank["Address"]["NodeID"] != own
        if "--kill" in sys.argv:
            os.kill(rank["Pid"], signal.SIGKILL)
        started = time.monotonic()
        try:
            found["second"] = tokens(core, "second")
        except RanksLostError as error:
            found["error"], found["seconds"] = str(error), time.monotonic() - started
    found["left"] = left_in_cluster()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
