"""The folder by which a one-machine cluster's workers compute in turn; it goes with the cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from baton.up.cluster import ClusterConfig
from baton.up.run_folder import run_folder

__all__ = ["taking_turns"]


@contextmanager
def taking_turns(config: ClusterConfig) -> Iterator[ClusterConfig]:
    """The config, with a folder for turns where several workers may compute on the CPU.

    `--device auto` may be a GPU: workers on one have no use for the folder.
    """
    num_workers = config.num_prefill + config.num_decode
    if num_workers == 1 or config.engine.device not in ("auto", "cpu"):
        yield config
        return
    with run_folder() as folder:
        yield replace(config, engine=replace(config.engine, turns_folder=str(folder)))
