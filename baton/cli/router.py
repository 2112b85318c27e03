"""`baton router`: a router, as one process or as several at the same ports."""

import argparse
import sys

from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.flags.parser import FlagParser
from router.config.processes import ProcessesConfig
from router.config.router import add_args as add_router_args
from router.config.router import router_config_from_args
from router.server import main as run_one_process
from rpc.server import run_process

__all__ = ["add_args", "main"]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a router, and the number of its processes."""
    add_flags(parser, ProcessesConfig, "server")
    add_router_args(parser)


def main(args: argparse.Namespace) -> int:
    """Runs the router, which serves clients and calls the prefill and decode replicas."""
    num_processes = config_from_args(ProcessesConfig, args).processes
    if num_processes == 1:
        return run_one_process(args)

    async def run() -> None:
        # Imported here: a router of one process starts without what supervises others.
        from baton.up.router_processes import run_router_processes

        await run_router_processes(router_config_from_args(args), num_processes, args.models)

    return run_process("baton router", args.log_level, args.log_format, run)


if __name__ == "__main__":
    sys.exit(main(FlagParser.of_command("baton router", main, add_args).parse_args()))
