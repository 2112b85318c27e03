"""Limits of cores and memory, set by control groups of either version."""

import pytest

from baton.machine_limits import Memory, affine_cores, cpu_quota, read_memory, usable_cores

GIB = 1 << 30
MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 5 kB\nMemAvailable: {9 * GIB // 1024} kB\n"


@pytest.fixture
def machine(tmp_path):
    """Returns a function that writes files under a root folder and returns the root."""

    def write_files(group, files):
        for name, text in {"proc/self/cgroup": group, "proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write_files


def test_there_is_no_limit_without_control_groups(machine):
    root = machine("", {})
    assert cpu_quota(root) is None
    assert read_memory(root) == Memory(total=16 * GIB, available=9 * GIB, limit=None)


def test_limits_are_unknown_without_proc_and_sys(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert read_memory(tmp_path) == Memory(None, None, None)


def test_limits_of_version_2(machine):
    root = machine(
        "0::/pod/container\n",
        {
            "sys/fs/cgroup/pod/container/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/pod/container/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/container/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/container/memory.stat": f"anon 7\ninactive_file {2 * GIB}\n",
        },
    )
    assert cpu_quota(root) == 2.5
    assert read_memory(root) == Memory(total=16 * GIB, available=3 * GIB, limit=4 * GIB)


def test_limits_of_parent_groups_apply_too(machine):
    root = machine(
        "0::/pod/container\n",
        {
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{2 * GIB}\n",
        },
    )
    assert cpu_quota(root) == 1.5
    assert read_memory(root) == Memory(total=16 * GIB, available=0, limit=GIB)


def test_limits_of_version_1_in_a_container_with_the_path_of_its_host(machine):
    root = machine(
        "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert cpu_quota(root) == 4
    assert read_memory(root) == Memory(total=16 * GIB, available=7 * GIB, limit=8 * GIB)


def test_version_1_may_have_no_limits(machine):
    root = machine(
        "5:cpu:/\n4:memory:/\n",
        {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        },
    )
    assert cpu_quota(root) is None
    assert read_memory(root) == Memory(total=16 * GIB, available=9 * GIB, limit=None)


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"), [(8, None, 8), (8, 2.5, 2), (2, 4.0, 2), (4, 0.3, 1)]
)
def test_usable_cores_are_bounded_by_affinity_and_quota(monkeypatch, affinity, quota, cores):
    monkeypatch.setattr("baton.machine_limits.affine_cores", lambda: affinity)
    monkeypatch.setattr("baton.machine_limits.cpu_quota", lambda: quota)
    assert usable_cores() == cores


def test_this_process_may_use_a_core():
    assert affine_cores() >= usable_cores() >= 1
