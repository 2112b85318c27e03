"""Calls of a router by the client libraries of other languages, each in a process of its own.

A program reads jobs from its standard input, one JSON object a line:

    {"id": 1, "method": "GenerateStream", "request": {...}, "timeoutS": 30, "metadata": {...},
     "retries": 1, "leaveAfter": 2, "cancelAfter": 2}

`request` is a GenerateRequest in the JSON of protobuf; all but the first three may be absent. A
call that ends UNAVAILABLE is made again up to `retries` times. After `leaveAfter` messages of a
stream the program stops reading without a cancel, as a loop does that is left by `break`; after
`cancelAfter` messages it cancels the call. Its lines of standard output are

    {"id": 1, "message": {...}}                              each message
    {"id": 1, "retry": "why"}                                the call is made again
    {"id": 1, "code": 0, "details": "", "trailers": {...}}   the end of the call
    {"id": 1, "left": true}                                  the end of a job with `leaveAfter`

Programs of Node and Go run jobs at the same time, those of C++ and Ruby one after the other; these
two know neither retries nor early ends.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from baton.v1 import generation_pb2
from rpc.errors import status_of_number
from tests.support.grpc_clients.builds import PROTOS, MissingToolError, command_of

__all__ = ["ClientCall", "ClientProgram", "require_client", "running_client"]

_MAX_LINE_BYTES = 64 * 2**20
_RESPONSES: dict[str, type[Any]] = {
    "Generate": generation_pb2.GenerateResponse,
    "GenerateStream": generation_pb2.GenerateStreamResponse,
}


@dataclass
class ClientCall:
    """A call that a program makes.

    Attributes:
        method: "Generate" or "GenerateStream".
        messages: the messages so far of the last attempt.
        code: its status; None while it runs, and if the program has left it.
        details: the text of the status.
        trailers: the metadata that followed.
        retried: why attempts failed.
        started: set with the first message, or the end.
        ended: set when the call has ended, or the program has left it.
    """

    method: str
    messages: list[Any] = field(default_factory=list)
    code: grpc.StatusCode | None = None
    details: str = ""
    trailers: dict[str, str] = field(default_factory=dict)
    retried: list[str] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, line: Mapping[str, Any]) -> None:
        """Takes a line of the program's output."""
        if "message" in line:
            message = _RESPONSES[self.method]()
            self.messages.append(json_format.ParseDict(line["message"], message))
        elif "retry" in line:
            self.retried.append(line["retry"])
            self.messages.clear()
            return
        else:
            self._end(line)
        self.started.set()

    def _end(self, line: Mapping[str, Any]) -> None:
        if not line.get("left"):
            self.code = status_of_number(int(line["code"]))
            self.details = line.get("details", "")
            self.trailers = dict(line.get("trailers") or {})
        self.ended.set()


class ClientProgram:
    """A running program.

    Attributes:
        process: the process.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._calls: dict[int, ClientCall] = {}
        self._reader = asyncio.ensure_future(self._read())

    def start(
        self, method: str, request: generation_pb2.GenerateRequest, **options: Any
    ) -> ClientCall:
        """Starts a call; `options` are fields of the job, such as `timeoutS`."""
        call = ClientCall(method)
        number = len(self._calls)
        self._calls[number] = call
        job = {"id": number, "method": method, "request": json_format.MessageToDict(request)}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**job, **options}).encode() + b"\n")
        return call

    async def call(
        self, method: str, request: generation_pb2.GenerateRequest, **options: Any
    ) -> ClientCall:
        """Makes a call and waits for its end."""
        call = self.start(method, request, **options)
        await call.ended.wait()
        return call

    async def close(self) -> None:
        """Lets the calls end, and then the program."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self._reader

    async def kill(self) -> None:
        """Ends the program at once, as a crash would."""
        if self.process.returncode is None:
            self.process.kill()
        await self._reader

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for text in self.process.stdout:
            line = json.loads(text)
            self._calls[int(line["id"])].take(line)
        await self.process.wait()
        for call in self._calls.values():  # of a program that has ended early
            call.started.set()
            call.ended.set()


def require_client(kind: str) -> tuple[list[str], Any]:
    """Returns the command of a program and its folder; skips the test if a tool is missing."""
    try:
        return command_of(kind)
    except MissingToolError as error:
        pytest.skip(str(error))


@asynccontextmanager
async def running_client(
    kind: str, *addresses: str, options: Mapping[str, Any] | None = None
) -> AsyncIterator[ClientProgram]:
    """Runs a program, which is killed at the end.

    Args:
        kind: one of `builds.KINDS`.
        addresses: the router's `host:port`; of several, the client takes the first that answers
            (`pick_first`).
        options: grpc-js: options of the channel; go: a service config, as an object of JSON.
    """
    command, folder = await asyncio.to_thread(require_client, kind)
    arguments = [str(PROTOS), ",".join(addresses)]
    if options is not None:
        arguments.append(json.dumps(options))
    process = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        cwd=folder,
        env={**os.environ, "GRPC_GO_RETRY": "on"},  # the default of newer releases
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
    )
    program = ClientProgram(process)
    try:
        yield program
    finally:
        await program.kill()
