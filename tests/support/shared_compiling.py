"""One compile process for the engines of many tests: the start of each imports torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from engine.constraints import compiler
from engine.constraints.compile_process import CompileProcess
from engine.constraints.vocabulary import Vocabulary

__all__ = ["SharedCompileProcesses"]

_Key = tuple[str, ...]  # of a process: its vocabulary and backends


class SharedCompileProcesses:
    """Compile processes that run until `close`, one for each vocabulary and choice of backends."""

    def __init__(self) -> None:
        self._processes: dict[_Key, CompileProcess] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, compilers use these processes, which their own `close` does not end."""
        processes = self._processes

        class Shared:
            """Takes the place of one compiler's `CompileProcess`."""

            def __init__(
                self, get_vocabulary: Callable[[], Vocabulary], backends: Sequence[str]
            ) -> None:
                self._get_vocabulary, self._backends = get_vocabulary, tuple(backends)

            def run_job(self, job: bytes, timeout_s: float) -> bytes:
                vocabulary = self._get_vocabulary()
                key = (vocabulary.to_json(), *self._backends)
                process = CompileProcess(lambda: vocabulary, self._backends)
                return processes.setdefault(key, process).run_job(job, timeout_s)

            def close(self) -> None:
                pass

        with mock.patch.object(compiler, "CompileProcess", Shared):
            yield

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes.values():
            process.close()
