"""`baton health`: for people and for container health checks."""

import argparse
import asyncio

from baton.health import check_health

__all__ = ["add_args", "main"]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("address", metavar="HOST:PORT", help="the server")
    parser.add_argument(
        "--service", default="", help="full name of one of its services (default: the server)"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for an answer (default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    """Asks a server whether it serves (grpc.health.v1); exit status 0 if it does, else 1."""
    status = asyncio.run(check_health(args.address, service=args.service, timeout_s=args.timeout_s))
    print(status)
    return 0 if status == "SERVING" else 1
