"""Ranks as Ray actors, on the nodes of a Ray cluster that have room.

    rank 0       EngineCore; joins the cluster, reserves room and creates the actors
    rank 1 ...   RankActor, which meets rank 0 as a process on another host would

Ray places the ranks and ends them. Batches, sums and transfers use the connections of `HostRanks`,
which also notice a rank that has ended.
"""

import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from baton.common.errors import ConfigurationError
from baton.common.ports import keep_from_others
from baton.common.ray_cluster import (
    BlockingActor,
    actor_class,
    actor_options,
    in_bundle,
    join_cluster,
    reserve,
)
from baton.common.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.runtime.device import resolve_device
from engine.runtime.ranks.hosts import HostRanks
from engine.runtime.ranks.loop import follow
from engine.runtime.ranks.place import RankPlace
from kernels.ranks import RanksLostError
from kvstore.handoff import connector_name
from kvstore.registry import connector_capabilities, has_fixed_host

__all__ = ["RankActor", "RayRanks"]

_END_TIMEOUT_S = 5.0


class RankActor:
    """A rank other than 0, in an actor."""

    def follow(
        self, place: RankPlace, config: EngineConfig, token: str, security: ClusterSecurity | None
    ) -> str:
        """Computes batches until rank 0 has ended.

        Args:
            place: the rank's place.
            config: of the engine.
            token: what the ranks prove to each other.
            security: for the connector's calls to other processes.

        Returns:
            Why this rank has failed; empty if rank 0 has closed the group.
        """
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
        try:
            follow(config, HostRanks(place, config, ClusterSecurity(token=token)), security)
        except (RanksLostError, ConfigurationError) as error:
            logging.getLogger("baton.engine").error("rank %d: %s", place.rank, error)
            return str(error)
        return ""


class RayRanks(HostRanks):
    """Rank 0 of a group whose other ranks are Ray actors, which it creates.

    Args:
        config: of the engine.
        security: its token is proved by all ranks; without one, the group has a token of its own.

    Raises:
        ConfigurationError: Ray is not installed, its cluster has no room, or a rank did not start.
    """

    def __init__(self, config: EngineConfig, security: ClusterSecurity | None) -> None:
        self._ray = join_cluster()
        size, bundle = config.num_ranks, rank_resources(config)
        purpose = f"{size - 1} of the {size} ranks of an engine"
        self._group, nodes = reserve(self._ray, [bundle] * (size - 1), purpose)
        try:
            nodes = [self._ray.get_runtime_context().get_node_id(), *nodes]
            check_reach(config.kv_connector, nodes)
            token = (security.token if security else None) or secrets.token_urlsafe(32)
            first, *others = self._places(nodes)
            # Arguments of calls do not appear in Ray's dashboard, unlike environment variables.
            theirs = replace(config, weights_folder=None)  # a folder of this machine
            factory = actor_class(self._ray, RankActor, BlockingActor)
            self._results = [
                factory.options(**actor_options(bundle, in_bundle(self._group, place.rank - 1)))
                .remote()
                .call.remote(
                    "follow", place, theirs, token, security and security.without_token_file()
                )
                for place in others
            ]
            super().__init__(first, config, ClusterSecurity(token=token))
        except BaseException:
            self._remove_actors()
            raise

    @override
    def close(self) -> None:
        if self._is_closing:
            return
        super().close()
        if not self._is_lost:
            self._ray.wait(self._results, num_returns=len(self._results), timeout=_END_TIMEOUT_S)
        self._remove_actors()

    def _places(self, nodes: Sequence[str]) -> list[RankPlace]:
        address = self._ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            keep_from_others(server)
        return [
            RankPlace(rank, len(nodes), address, port, num_local=nodes.count(node))
            for rank, node in enumerate(nodes)
        ]

    @override
    def _check_others(self) -> None:
        for rank, result in enumerate(self._results, 1):
            ended, _ = self._ray.wait([result], timeout=0)
            if ended:
                raise ConfigurationError(f"rank {rank} did not start: {self._reason(result)}")

    def _reason(self, result: Any) -> str:
        try:
            return str(self._ray.get(result))
        except self._ray.exceptions.RayError as error:
            return str(error)

    def _remove_actors(self) -> None:
        """Gives the room back, which ends the actors in it."""
        self._ray.util.remove_placement_group(self._group)


def rank_resources(config: EngineConfig) -> dict[str, float]:
    """Returns the resources of a rank on its node: the cores of its threads, or a GPU."""
    if resolve_device(config.device).type == "cuda":
        return {"CPU": 1, "GPU": 1}
    return {"CPU": config.num_threads or 1}


def check_reach(connector: str | None, nodes: Sequence[str]) -> None:
    """Refuses a connector of one machine for ranks on several.

    Args:
        connector: its URL; None without one.
        nodes: ids of the ranks' nodes.

    Raises:
        ConfigurationError: names the flag.
    """
    count = len(set(nodes))
    if not connector or count == 1:
        return
    if not connector_capabilities(connector).shared_between_hosts or has_fixed_host(connector):
        raise ConfigurationError(
            f"--kv-connector {connector_name(connector)} reaches the processes of one machine; "
            f"Ray has placed the ranks on {count}: use redis://host:port/db, or grpc://0.0.0.0 "
            "without advertise"
        )
