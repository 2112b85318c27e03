"""Limits of cores and memory, set by control groups of either version."""

from pathlib import Path

import pytest

from baton.common.machine_limits import (
    Memory,
    Tasks,
    affine_cores,
    count_memory_kills,
    cpu_quota,
    is_in_memory,
    kept_memory_share,
    private_bytes,
    read_memory,
    read_tasks,
    usable_cores,
)

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
    ("group", "folder"),
    [("0::/pod/container\n", "pod/container"), ("8:pids:/docker/abc\n0::/\n", "pids")],
    ids=["version 2", "version 1"],
)
def test_the_limit_of_tasks_of_both_versions(machine, group, folder):
    files = {"pids.max": "max\n", "pids.current": "7\n"}
    paths = {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}
    assert read_tasks(machine(group, paths)) == Tasks(None)
    paths[f"sys/fs/cgroup/{folder}/pids.max"] = "64\n"
    assert read_tasks(machine(group, paths)) == Tasks(limit=64, used=7)


def test_the_smallest_limit_of_tasks_counts(machine):
    root = machine(
        "0::/pod/container\n",
        {
            "sys/fs/cgroup/pod/container/pids.max": "100\n",
            "sys/fs/cgroup/pod/container/pids.current": "3\n",
            "sys/fs/cgroup/pod/pids.max": "50\n",
            "sys/fs/cgroup/pod/pids.current": "40\n",
        },
    )
    assert read_tasks(root) == Tasks(limit=50, used=40)


def test_processes_killed_for_memory_are_counted_in_both_versions(machine):
    assert count_memory_kills(machine("", {})) is None
    events = {"sys/fs/cgroup/pod/memory.events": "oom 9\noom_kill 2\n"}
    assert count_memory_kills(machine("0::/pod\n", events)) == 2
    control = {"sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\noom_kill 3\n"}
    assert count_memory_kills(machine("4:memory:/docker/abc\n0::/other\n", control)) == 3


def test_cached_files_do_not_count_as_kept(machine):
    assert kept_memory_share(machine("", {})) is None
    group = "sys/fs/cgroup/pod"
    root = machine(
        "0::/pod\n",
        {
            f"{group}/memory.max": "1000\n",
            f"{group}/memory.current": "900\n",
            f"{group}/memory.stat": "active_file 100\ninactive_file 200\nslab_reclaimable 50\n",
        },
    )
    assert kept_memory_share(root) == 0.55


def test_the_memory_of_a_process_itself_leaves_files_out(machine):
    root = machine("", {"proc/self/status": "VmRSS: 900 kB\nRssAnon:\t 300 kB\nRssFile: 600 kB\n"})
    assert private_bytes(root) == 300 * 1024


def test_a_folder_lies_in_memory_if_its_nearest_mount_does(machine):
    mounts = b"/dev/sdc /\xff ext4 rw 0 0\n/dev/sda / ext4 rw 0 0\n"
    mounts += b"tmpfs /dev/shm tmpfs rw 0 0\n/dev/sdb /dev/shm/disk xfs rw 0 0\n"
    root = machine("", {})
    (root / "proc/self/mounts").write_bytes(mounts)
    assert is_in_memory(Path("/dev/shm/baton-x"), root)
    assert not is_in_memory(Path("/dev/shm/disk/x"), root)
    assert not is_in_memory(Path("/var"), root)


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"), [(8, None, 8), (8, 2.5, 2), (2, 4.0, 2), (4, 0.3, 1)]
)
def test_usable_cores_are_bounded_by_affinity_and_quota(monkeypatch, affinity, quota, cores):
    monkeypatch.setattr("baton.common.machine_limits.affine_cores", lambda: affinity)
    monkeypatch.setattr("baton.common.machine_limits.cpu_quota", lambda: quota)
    assert usable_cores() == cores


def test_this_process_may_use_a_core():
    assert affine_cores() >= usable_cores() >= 1
