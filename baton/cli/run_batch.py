"""`baton run-batch`: runs a file of requests in OpenAI's batch format."""

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import httpx2
from tqdm import tqdm

from baton.cli.batch.files import BatchLine, OutputFile, check_input, read_lines
from baton.cli.batch.sender import RequestSender
from baton.cli.openai_endpoint import (
    DEFAULT_URL,
    HTTP_OMITS,
    client_options,
    parse_base_url,
)
from baton.cli.serve_config import add_cluster_args, running_config
from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.security.client import ClientTls
from baton.up.cluster import background_cluster
from baton.up.plan import plan_cluster
from router.config.security import ClientTlsConfig
from router.config.tenants import TenantsConfig
from worker.processes.output import log_writer

__all__ = ["add_args", "main", "run_batch"]

_DEFAULT_CONCURRENCY = 32


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="requests: a JSON object per line, with custom_id, method, url and body",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="results, a JSON object per line; requests that it answers already are not run again",
    )
    parser.add_argument(
        "--url",
        help="base URL of an OpenAI API; with --model, a cluster is started instead "
        f"(default: {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="key of the API (default: the variable OPENAI_API_KEY)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=_DEFAULT_CONCURRENCY,
        metavar="N",
        help="number of requests at once (default: %(default)s)",
    )
    parser.add_argument(
        "--max-retries",
        type=int,
        default=8,
        metavar="N",
        help="further attempts of a request that the server is too busy for, or whose connection "
        "is lost (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest time of one attempt (default: %(default)g)",
    )
    add_flags(parser, ClientTls, "security", omit=HTTP_OMITS)
    # The cluster of --model is for this command alone; --api-key is the key that it sends.
    omit = [one.name for config in (ClientTlsConfig, TenantsConfig) for one in fields(config)]
    add_cluster_args(
        parser, omit=[*omit, "uds", "batch_folder"], model=None, port=0, grpc_port=None
    )


def main(args: argparse.Namespace) -> int:
    """Runs the requests of a file and writes a line per result, in the order in which they end.

    The same command continues an interrupted run: results that the output file has are kept, and
    requests that the server was too busy for, that it redirected or refused for their key, or that
    failed with a status of 500 or more, run again. A line that is no request becomes an error line.
    A file in which a custom_id occurs twice is refused before anything runs, because results are
    matched by it. The exit status is 1 if a result is an error.

    With --model, the command starts a cluster with the flags of `baton serve`, and stops it at the
    end.
    """
    for flag, number, least in (
        ("concurrency", args.concurrency, 1),
        ("max-retries", args.max_retries, 0),
    ):
        if number < least:
            raise ConfigurationError(f"--{flag} is {number}; it must be >= {least}")
    tls = config_from_args(ClientTls, args)
    if args.model is not None and (args.url is not None or args.port is None or tls.is_on):
        raise ConfigurationError(
            "--model starts a cluster; leave --url, --port none and the --ssl flags out"
        )
    num_lines = check_input(args.input_file)
    with OutputFile(args.output_file) as output, _served(args) as url:
        asyncio.run(run_batch(args, url, output, num_lines))
        sys.stderr.write(
            f"{output.num_succeeded} requests succeeded, {output.num_failed} failed; "
            f"results in {args.output_file}\n"
        )
        return int(output.num_failed > 0)


@contextmanager
def _served(args: argparse.Namespace) -> Generator[str, None, None]:
    """Yields the URL of the server; starts a cluster for that if there is a `--model`."""
    if args.model is None:
        yield args.url or DEFAULT_URL
        return
    with running_config(argparse.Namespace(**{**vars(args), "api_key": ()})) as config:
        plan = plan_cluster(config)
        with background_cluster(plan, log_writer(args.log_format)):
            yield plan.router.url


async def run_batch(args: argparse.Namespace, url: str, output: OutputFile, num_lines: int) -> None:
    """Sends the requests that have no result yet, `--concurrency` at a time.

    Args:
        args: the command's flags.
        url: base URL of the server.
        output: gets the results.
        num_lines: lines of the input, for the progress bar.

    Raises:
        UnavailableError: the server cannot be reached; what has ended is in the output.
    """
    # One iterator that all workers share: only the lines in work are in memory.
    lines = (line for line in read_lines(args.input_file) if not output.has_result(line))
    with tqdm(total=num_lines, initial=output.num_results, unit="request") as progress:
        async with _open_sender(parse_base_url(url), args) as sender:
            await sender.check_reachable()
            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(args.concurrency):
                        workers.create_task(_run_lines(lines, sender, output, progress))
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None


async def _run_lines(
    lines: Iterator[BatchLine],
    sender: RequestSender,
    output: OutputFile,
    progress: "tqdm[NoReturn]",
) -> None:
    for line in lines:
        await sender.run(line, output)
        progress.update()


@asynccontextmanager
async def _open_sender(url: str, args: argparse.Namespace) -> AsyncGenerator[RequestSender, None]:
    tls = config_from_args(ClientTls, args)
    options = client_options(url, args.api_key, args.timeout_s, tls)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=args.concurrency)
    async with httpx2.AsyncClient(**options, limits=limits) as client:
        yield RequestSender(client, url, max_retries=args.max_retries, timeout_s=args.timeout_s)
