"""One compile process for the engines of many tests: the start of each imports torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from unittest import mock

from engine.constraints import compiler
from engine.constraints.compile_process import CompileProcess
from engine.constraints.vocabulary import Vocabulary

__all__ = ["shared_compile_processes"]

_Key = tuple[str, ...]  # of a process: its vocabulary and backends


@contextmanager
def shared_compile_processes() -> Iterator[None]:
    """Inside, compilers of the same vocabulary and backends share a process. `close` of a compiler
    ends it only while it does a job of that compiler.
    """
    processes: dict[_Key, CompileProcess] = {}

    class Shared:
        """Takes the place of one compiler's `CompileProcess`."""

        def __init__(
            self, get_vocabulary: Callable[[], Vocabulary], backends: Sequence[str]
        ) -> None:
            self._get_vocabulary, self._backends = get_vocabulary, tuple(backends)
            self._running: list[_Key] = []

        def run_job(self, job: bytes, timeout_s: float) -> bytes:
            vocabulary = self._get_vocabulary()
            key = (vocabulary.to_json(), *self._backends)
            process = CompileProcess(lambda: vocabulary, self._backends)
            self._running.append(key)
            try:
                return processes.setdefault(key, process).run_job(job, timeout_s)
            finally:
                self._running.remove(key)

        def close(self) -> None:
            for key in set(self._running):
                processes.pop(key).close()

    with ExitStack() as stack, mock.patch.object(compiler, "CompileProcess", Shared):
        yield
        for process in processes.values():
            stack.enter_context(closing(process))
