"""The example for LeaderWorkerSet has flags and variables that Baton reads."""

import argparse
from pathlib import Path

import yaml

from engine.cli_args import engine_config_from_args
from engine.request import Role
from engine.runtime.ranks.place import place_of
from worker.server import add_args

MANIFEST = Path(__file__).parents[3] / "deploy" / "kubernetes" / "leader-worker-set.yaml"


def test_the_pods_of_a_group_are_the_ranks_of_an_engine() -> None:
    group, service = yaml.safe_load_all(MANIFEST.read_text())
    template = group["spec"]["leaderWorkerTemplate"]
    (container,) = template["workerTemplate"]["spec"]["containers"]
    tier, *arguments = container["args"]
    parser = argparse.ArgumentParser()
    add_args(parser, Role[tier.upper()])
    args = parser.parse_args(arguments)
    config = engine_config_from_args(args)
    variables = {"LWS_GROUP_SIZE": str(template["size"]), "LWS_LEADER_ADDRESS": "leader"}
    places = [place_of(config, variables | {"LWS_WORKER_INDEX": str(i)}) for i in range(2)]
    assert [(place.rank, place.size) for place in places if place] == [(0, 2), (1, 2)]
    assert [port["port"] for port in service["spec"]["ports"]] == [args.port]
