"""The process that compiles grammars: `python -m engine.constraints.compile_server FD BACKEND...`.

A backend's compiler is native code, which no thread can interrupt, and what users send may
keep it busy for hours, make it use all memory or overflow its stack. This process loads the
backends once and forks a child for each grammar. The kernel ends the child at its deadline and
limits its memory.

The parent sends the vocabulary over the socket FD, then one socket per grammar. Over that the
child reads its job and writes its answer. If the child dies, the parent reads an early end.
"""

import json
import math
import os
import random
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.common.errors import InvalidArgumentError
from baton.common.request.schema_parts import SchemaPart
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.backends import compile_with, load_backend
from engine.constraints.compile_process import (
    READY,
    STARTED,
    WALL_TIMES,
    read_message,
    write_message,
)
from engine.constraints.hints import (
    ANY_OBJECT,
    change_hints,
    repair_schema,
    schemas_of_parts,
)
from engine.constraints.interface import Backend, RefusedError
from engine.constraints.matcher import Constraint
from engine.constraints.schema import check_schema
from engine.constraints.structural_tags import schemas_of_tag, tag_with_format
from engine.constraints.vocabulary import Vocabulary
from engine.constraints.xgrammar import endless_rule_of

__all__ = ["main", "try_out"]

_NICENESS = 10  # the engine's own threads come first
_NUM_TRIED_TOKENS = 48


def main(control_fd: int, names: Sequence[str]) -> None:
    """Serves jobs until the parent closes the control socket."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    # Of the whole group of processes. They are the parent's, which drains and closes the socket.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=control_fd) as control:
        setup = read_message(control)
        if setup is None:
            return
        vocabulary = Vocabulary.from_json(setup.decode())
        backends = {name: load_backend(name, vocabulary) for name in names}
        control.sendall(READY)
        while True:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            for fd in fds:
                if os.fork() == 0:
                    control.close()
                    _run_child(fd, vocabulary, backends)
                os.close(fd)


def _run_child(fd: int, vocabulary: Vocabulary, backends: Mapping[str, Backend]) -> None:
    """Does one job and ends the process."""
    status = 1
    try:
        with socket.socket(fileno=fd) as channel:
            channel.sendall(STARTED)
            job = read_message(channel)
            if job is not None:
                write_message(channel, _answer(json.loads(job), vocabulary, backends))
                status = 0
    finally:
        os._exit(status)


def _answer(job: dict[str, Any], vocabulary: Vocabulary, backends: Mapping[str, Backend]) -> bytes:
    """Returns a line of JSON, and after it the compiled grammar."""
    _limit(job["timeout_s"], job["memory_bytes"])
    outputs = _parse_job(job)
    field = outputs.client_field
    try:
        _check_ends(outputs, field, backends)
        compiled = compile_with(backends, job["backend"], outputs, job["max_whitespace"])
        grammar = backends[compiled.backend].load(compiled.data)
        try_out(Constraint(grammar, vocabulary, field))
    except InvalidArgumentError as error:
        return json.dumps({"error": error.message}).encode()
    except RefusedError as error:
        return json.dumps({"error": f"{field} is not supported: {error}"}).encode()
    except (MemoryError, RecursionError):
        return json.dumps({"error": f"{field} is too large to compile; simplify it"}).encode()
    except Exception:
        return json.dumps({"bug": traceback.format_exc()}).encode()
    return json.dumps({"backend": compiled.backend}).encode() + b"\n" + compiled.data


def _parse_job(job: dict[str, Any]) -> StructuredOutputs:
    """Returns the constraint of a job, with well-formed hints that are not too large."""
    parts = [SchemaPart(**part) for part in job["outputs"]["parts"]]
    outputs = StructuredOutputs(**job["outputs"] | {"parts": parts})
    if not any(part.is_hint for part in parts):
        return outputs
    limit = math.inf if job["max_hint_chars"] is None else job["max_hint_chars"]

    def change(schema: Any) -> Any:
        return repair_schema(schema) if len(json.dumps(schema)) <= limit else ANY_OBJECT

    return change_hints(outputs, change)


def _limit(timeout_s: float, memory_bytes: int) -> None:
    """Makes the kernel end this process at its deadline, and limits its memory."""
    for kind, timer, limit_s in (
        (signal.SIGPROF, signal.ITIMER_PROF, timeout_s),
        (signal.SIGALRM, signal.ITIMER_REAL, WALL_TIMES * timeout_s),
    ):
        signal.signal(kind, signal.SIG_DFL)
        signal.setitimer(timer, limit_s)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _check_ends(outputs: StructuredOutputs, field: str, backends: Mapping[str, Backend]) -> None:
    """Refuses schemas and grammars that no backend refuses, though no text obeys them.

    Raises:
        InvalidArgumentError: says why.
        RefusedError: a structural tag is malformed.
    """
    for part, schema in schemas_of_parts(outputs):
        check_schema(schema, part.field)
    if outputs.json is not None:
        check_schema(json.loads(str(outputs.json)), field)
    if outputs.structural_tag is not None:
        for schema in schemas_of_tag(tag_with_format(json.loads(str(outputs.structural_tag)))):
            check_schema(schema, field)
    if outputs.grammar is None or "xgrammar" not in backends:
        return
    if rule := endless_rule_of(outputs.grammar):
        raise InvalidArgumentError(f"{field} has no finite text: the rule {rule} has none")


def try_out(constraint: Constraint) -> None:
    """Draws some tokens under a grammar's masks, as a sequence would.

    Raises:
        InvalidArgumentError: no text belongs to the grammar, or its masks take too long.
    """
    vocabulary = constraint.vocabulary
    drawn = random.Random(0)
    row = np.zeros(vocabulary.num_mask_words, dtype=np.int32)
    matcher = constraint.new_matcher(vocabulary.eos_token_ids)
    for _ in range(_NUM_TRIED_TOKENS):
        matcher.fill_mask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        token_id = drawn.choice(np.flatnonzero(bits[: vocabulary.size]).tolist())
        if token_id in vocabulary.eos_token_ids or not matcher.accept(token_id):
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
    os._exit(0)  # nothing needs cleaning up, and unloading torch takes seconds
