"""What `baton doctor` finds out: the machine, the software, which CPU kernels run and why.

`examine` runs every check. A check is a function that returns findings; none of them
changes anything, and one that fails is a finding itself.
"""

from collections.abc import Callable, Iterable

from baton.doctor import connectors, machine, native_kernels, software
from baton.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]

_Check = Callable[[], Iterable[Finding]]

_CHECKS: tuple[_Check, ...] = (
    software.check_versions,
    software.check_torch,
    machine.check_cpu,
    machine.check_cores,
    machine.check_threads,
    native_kernels.check_selection,
    native_kernels.check_result,
    native_kernels.check_libraries,
    native_kernels.check_compiler,
    machine.check_memory,
    machine.check_shared_memory,
    software.check_extras,
)


def examine(kv_connector: str | None = None) -> list[Finding]:
    """Everything that `baton doctor` tells, in its order.

    Args:
        kv_connector: the URL of a KV connector to try; None for none.
    """
    checks = [*_CHECKS]
    if kv_connector is not None:
        checks.append(lambda: connectors.check_connector(kv_connector))
    return [finding for check in checks for finding in _run(check)]


def _run(check: _Check) -> list[Finding]:
    """The check's findings. What is broken enough to stop a check is what is looked for."""
    try:
        return list(check())
    except Exception as error:
        topic = getattr(check, "__name__", "check").removeprefix("check_")
        return [Finding(topic, Level.PROBLEM, f"{type(error).__name__}: {error}")]
