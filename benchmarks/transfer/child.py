"""Objects in processes of their own, whose methods are called from here.

The processes are forked from one that has imported what they need and in which nothing has
begun, so that a dozen of them start in a second.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

__all__ = ["Child", "ChildError", "start_process"]

_PRELOADED = [
    "benchmarks.transfer.end_host",
    "benchmarks.transfer.tier",
    "engine.runtime.model_runner",
    "kvstore.mover.copies",
    "kvstore.peer.worker",
    "kvstore.stores.file.store",
    "kvstore.stores.redis.store",
    "kvstore.stores.shm.store",
    "transformers.models.auto.configuration_auto",
    "transformers.models.llama.configuration_llama",
]
"""What is imported before anything is forked. None of it starts a thread."""
_ANSWER_S = 300.0
_STOP_S = 20.0


class ChildError(RuntimeError):
    """A method failed in its process, or the process did not answer."""


def start_process(
    target: Callable[..., None], *arguments: Any
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Starts `target(pipe, *arguments)` in a process of its own.

    Returns:
        The process, and this end of the pipe.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


class Child:
    """An object that `make` makes in another process, and its methods.

    Args:
        make: a function that pickle finds by its name; what it makes has `close`.
        arguments: of it.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._process, self._pipe = start_process(_serve, make, arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method there; returns what it returns.

        Raises:
            ChildError: it raised, or does not answer.
        """
        self._pipe.send((method, arguments))
        if not self._pipe.poll(_ANSWER_S):
            raise ChildError(f"{method} has not ended for {_ANSWER_S:g} s")
        try:
            error, answer = self._pipe.recv()
        except EOFError:
            raise ChildError(f"the process ended during {method}") from None
        if error:
            raise ChildError(f"{method}: {error}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pipe.close()  # which ends it
        self._process.join(_STOP_S)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served = make(*arguments)
    try:
        while True:
            method, method_arguments = pipe.recv()
            try:
                answer = ("", getattr(served, method)(*method_arguments))
            except Exception as error:
                answer = (f"{type(error).__name__}: {error}", None)
            pipe.send(answer)
    except (EOFError, OSError):
        pass  # nobody asks any more
    finally:
        served.close()
