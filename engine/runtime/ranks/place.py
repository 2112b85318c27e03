"""Which rank a process is, if the ranks of its engine are started apart: on several hosts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig

__all__ = ["RankPlace", "place_of"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank of a group whose processes are started apart.

    Attributes:
        rank: number of the rank.
        size: number of ranks.
        address: host of rank 0.
        port: port there, at which the ranks meet.
        num_local: number of ranks on this machine.
        local_rank: number of this rank among them.
        is_host: whether rank 0 listens at this port itself; else a launcher does.
        starts_others: whether this process starts the other ranks of its machine.
    """

    rank: int
    size: int
    address: str
    port: int
    num_local: int = 1
    local_rank: int = 0
    is_host: bool = True
    starts_others: bool = False

    def places_to_start(self) -> "list[RankPlace]":
        """Returns the places of the ranks that this process starts."""
        numbers = range(1, self.num_local) if self.starts_others else ()
        return [
            replace(self, rank=self.rank + number, local_rank=number, starts_others=False)
            for number in numbers
        ]


def place_of(config: EngineConfig, environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Returns this process's place; None if it starts all others itself.

    Args:
        config: the flags.
        environment: variables of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
            MASTER_ADDR, MASTER_PORT), or of LeaderWorkerSet (LWS_WORKER_INDEX, LWS_GROUP_SIZE,
            LWS_LEADER_ADDRESS), for `--distributed-executor-backend external_launcher`.

    Raises:
        ConfigurationError: variables are missing or bad, there are not as many processes as
            ranks, or the machines cannot have as many ranks each; names them.
    """
    size = config.num_ranks
    if config.distributed_executor_backend == "external_launcher":
        return _launched(config, environment)
    if config.nnodes == 1:
        return None
    if size % config.nnodes:
        raise ConfigurationError(
            f"--nnodes is {config.nnodes}; it must divide {size}, --tensor-parallel-size times "
            "--pipeline-parallel-size: each machine has as many ranks"
        )
    num_local = size // config.nnodes
    return RankPlace(
        config.node_rank * num_local,
        size,
        config.master_addr,
        config.master_port,
        num_local=num_local,
        starts_others=True,
    )


def _launched(config: EngineConfig, environment: Mapping[str, str]) -> RankPlace:
    if "LWS_LEADER_ADDRESS" in environment:
        place = RankPlace(
            _number(environment, "LWS_WORKER_INDEX"),
            _number(environment, "LWS_GROUP_SIZE"),
            environment["LWS_LEADER_ADDRESS"],
            config.master_port,
        )
    else:
        place = RankPlace(
            _number(environment, "RANK"),
            _number(environment, "WORLD_SIZE"),
            environment.get("MASTER_ADDR", ""),
            _number(environment, "MASTER_PORT"),
            num_local=_number(environment, "LOCAL_WORLD_SIZE"),
            local_rank=_number(environment, "LOCAL_RANK"),
            is_host=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )
    if place.size != config.num_ranks or not 0 <= place.rank < place.size:
        raise ConfigurationError(
            f"--tensor-parallel-size times --pipeline-parallel-size is {config.num_ranks}; the "
            f"launcher has started {place.size} processes, of which this is number {place.rank}"
        )
    return place


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise ConfigurationError(
            f"the variable {name} is {value!r}; --distributed-executor-backend external_launcher "
            "needs the variables of torchrun or LeaderWorkerSet"
        )
    return int(value)
