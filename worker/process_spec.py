"""`worker_spec`: how another process starts a worker on this machine."""

from collections.abc import Iterable, Mapping

from baton.common.flags.config_flags import flags_of_config
from baton.common.flags.sources import variable_of
from engine.config import EngineConfig
from worker.processes.spawn import ProcessSpec

__all__ = ["worker_spec"]


def worker_spec(
    tier: str,
    number: int,
    engine: EngineConfig,
    flags: Iterable[str],
    environment: Mapping[str, str],
) -> ProcessSpec:
    """Returns the process of a worker.

    Args:
        tier: prefill or decode.
        number: the worker's number in its tier.
        engine: config of its engine.
        flags: its other flags, among them the address to listen on.
        environment: variables with the cluster's secrets.
    """
    omitted, variables = set[str](), dict(environment)
    if engine.kv_connector is not None:  # any URL may have a password, which ps would show
        omitted.add("kv_connector")
        variables[variable_of("kv-connector")] = engine.kv_connector
    arguments = (*flags_of_config(engine, omit=omitted), *flags)
    return ProcessSpec(f"{tier}-{number}", f"worker.{tier}", arguments, variables)
