"""`baton serve`: a router, prefill workers and decode workers."""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from baton.cli.chat import ChatSession, converse
from baton.cli.generate import print_stream
from baton.cli.openai_endpoint import OpenAiEndpoint
from baton.cli.serve_config import add_cluster_args, running_config
from baton.cli.terminal import Terminal
from baton.client import Client
from baton.common.errors import ConfigurationError
from baton.common.flags.unknown_variables import unknown_variables
from baton.common.model_files.named_models import DEMO_PROMPT
from baton.common.ray_cluster import cluster_address
from baton.common.request.sampling_params import SamplingParams
from baton.up.cluster import background_cluster, run_cluster
from baton.up.plan import ClusterConfig, ClusterPlan, Server, plan_cluster
from router.chat.template import ChatTemplate
from rpc.stop_signals import ignored_hangup
from worker.processes.output import discard_unread_output, log_writer

__all__ = ["add_args", "example_command", "main"]

_TRY_PROMPT = "Return a list of"
_TRY_MESSAGE = "What is the capital of France?"
_TRY_TOKENS = 64
_DEMO_PARAMS = SamplingParams(temperature=0.0, max_tokens=_TRY_TOKENS)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--demo", action="store_true", help="complete a prompt when the cluster is ready"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="talk to the model in this terminal; everything stops when the conversation ends",
    )
    parser.add_argument(
        "--on",
        choices=("machine", "ray"),
        default="machine",
        help="where the workers run: on this machine, or on the nodes of a Ray cluster "
        "(RAY_ADDRESS; needs the extra ray), where --kv-connector is grpc://0.0.0.0 by default "
        "(default: %(default)s)",
    )
    add_cluster_args(parser)


def main(args: argparse.Namespace) -> int:
    """Serves a model: a router on this machine, prefill workers and decode workers.

    OpenAI's and Anthropic's HTTP APIs are on --port, gRPC is on --grpc-port. Processes that die
    are restarted. Ctrl-C stops the router first, then the workers. Every worker gets the engine's
    flags.
    """
    if args.demo and args.grpc_port is None:
        raise ConfigurationError("--demo needs gRPC; leave --grpc-port none out")
    if args.chat and (args.port is None or args.uds is not None):
        raise ConfigurationError("--chat needs HTTP; leave --port none and --uds out")
    if args.uds is not None and args.grpc_port is None:
        raise ConfigurationError("--uds needs gRPC too, which says when the router serves")
    ray_address = cluster_address() if args.on == "ray" else None
    write = log_writer(args.log_format)
    for warning in unknown_variables():
        write(f"serve | warning: {warning}")
    hangup = nullcontext() if args.chat else ignored_hangup()
    with hangup, running_config(args, ray_address) as config:
        plan = plan_cluster(config)
        if (args.demo or args.chat) and plan.router.asks_for_certificates:
            raise ConfigurationError(
                "--demo and --chat have no certificate; leave --ssl-cert-reqs required out"
            )
        if (args.demo or args.chat) and not config.router.security.tenants.is_open:
            raise ConfigurationError(
                "--demo and --chat send no key; leave --api-key, --tenants and --jwks-file out"
            )
        if args.chat:
            _chat(config, plan, write)
        else:
            ready = partial(_on_ready, config, plan, args.demo)
            asyncio.run(run_cluster(plan, write, ready))
    return 0


def example_command(config: ClusterConfig, plan: ClusterPlan) -> str:
    """Returns a command for a shell that uses the cluster: a chat if the model has a template."""
    router, name = plan.router, config.model.names[0]
    if not router.http_address and config.router.http.uds is None:
        return shlex.join([sys.argv[0], "generate", _TRY_PROMPT, *_grpc_flags(config, router)])
    body: dict[str, object] = {"model": name}
    if ChatTemplate.load(config.model.model, config.model.chat_template) is None:
        path = "completions"
        body |= {"prompt": _TRY_PROMPT, "max_tokens": _TRY_TOKENS}
    else:
        path = "chat/completions"
        body |= {"messages": [{"role": "user", "content": _TRY_MESSAGE}]}
        body |= {"max_tokens": _TRY_TOKENS}
    headers = "-H 'Content-Type: application/json'"
    if not config.router.security.tenants.is_open:
        headers += ' -H "Authorization: Bearer $BATON_API_KEY"'
    return (
        f"curl {_curl_target(config, router)}/{path} {headers} -d {shlex.quote(json.dumps(body))}"
    )


def _watch_command(config: ClusterConfig, router: Server) -> str:
    """Returns a command that shows what the cluster does."""
    token = ["--cluster-token-file", config.token_file] if config.token_file is not None else []
    return shlex.join([sys.argv[0], "top", *_grpc_flags(config, router), *token])


def _grpc_flags(config: ClusterConfig, router: Server) -> list[str]:
    """The flags of a command that calls the router."""
    certfile = config.router.security.clients.certfile
    flags = ["--address", router.address]
    if certfile is not None:
        flags += ["--ssl-ca-certs", certfile]
        flags += ["--ssl-server-name", router.tls.ssl_server_name or "NAME"]
    return flags


def _curl_target(config: ClusterConfig, router: Server) -> str:
    """The router's URL for curl, with what curl needs to reach it and to trust its certificate."""
    tls, uds = router.tls, config.router.http.uds
    if uds is not None:
        scheme = "http" if tls.ssl_ca_certs is None else "https"
        trust = [] if tls.ssl_ca_certs is None else ["--cacert", tls.ssl_ca_certs]
        name = tls.ssl_server_name or "localhost"
        return shlex.join([*trust, "--unix-socket", uds, f"{scheme}://{name}/v1"])
    if tls.ssl_ca_certs is None:
        return router.url
    host, _, port = router.http_address.rpartition(":")
    name = tls.ssl_server_name or host
    # curl, like gRPC, trusts a certificate that it is given, without the CA that signed it.
    options = ["--cacert", tls.ssl_ca_certs]
    if name != host:
        options += ["--resolve", f"{name}:{port}:{host}"]
    return shlex.join([*options, f"https://{name}:{port}/v1"])


def _chat(config: ClusterConfig, plan: ClusterPlan, write: Callable[[str], None]) -> None:
    """Talks to the model while the cluster runs in the background."""
    router, name = plan.router, config.model.names[0]
    with (
        background_cluster(plan, write),
        OpenAiEndpoint(router.url, model=name, tls=router.tls) as endpoint,
    ):
        converse(ChatSession(endpoint, system=None, params={}), Terminal())


async def _on_ready(config: ClusterConfig, plan: ClusterPlan, with_demo: bool) -> None:
    """Streams the demonstration if asked for, then prints every server's address."""
    try:
        if with_demo:
            await asyncio.to_thread(_stream_demo, plan.router)
        _print_addresses(config, plan)
    except OSError:  # the reader has gone, or the disk is full: the cluster serves all the same
        discard_unread_output()


def _print_addresses(config: ClusterConfig, plan: ClusterPlan) -> None:
    router = plan.router
    print(f"Serving {', '.join(config.model.names)}")
    if router.http_address:
        print(f"{'http':<10} {router.url}")
        if config.router.http.page:
            print(f"{'page':<10} {router.page_url}")
    if config.router.http.uds is not None:
        print(f"{'http':<10} {config.router.http.uds}")
    if router.address:
        print(f"{'grpc':<10} {router.address}")
    for server in plan.workers:
        does_all = "" if plan.prefill or not server.gpu_share.gpus else ", prompts and answers"
        print(f"{server.spec.name:<10} {server.address}{_gpu_note(server)}{does_all}")
    for server in (router, *plan.workers):
        if server.metrics_url:
            print(f"{'metrics':<10} {server.metrics_url} of {server.spec.name}")
    if config.token_file is not None:
        print(f"{'token':<10} {config.token_file}")
    print(f"\nTry it:\n  {example_command(config, plan)}")
    if router.address:
        print(f"Watch it:\n  {_watch_command(config, router)}")
    print("Ctrl-C stops everything.", flush=True)


def _gpu_note(server: Server) -> str:
    share = server.gpu_share
    gpus = f" on GPU {', '.join(share.gpus)}" if share.gpus else ""
    return f"{gpus} (shared by {share.num_workers} workers)" if share.is_shared else gpus


def _stream_demo(router: Server) -> None:
    print(DEMO_PROMPT, end="", flush=True)
    with Client(router.address, **router.tls.options) as client:
        print_stream(client.stream(DEMO_PROMPT, _DEMO_PARAMS, timeout_s=120))
    print()
