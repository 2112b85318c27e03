"""Shared counts under processes that run at the same time, one of which is killed."""

import subprocess
import sys
from pathlib import Path

from router.processes.place import ProcessPlace
from router.processes.shared_counts import SharedAccounts, create_shared_counts

LIMIT, NUM_PROCESSES = 2, 5
PROGRAM = """
import sys, time
from router.processes.place import ProcessPlace
from router.processes.shared_counts import SharedAccounts

number, count, limit, folder = int(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
account = SharedAccounts(ProcessPlace(number, count, folder)).account("tenant", "a")
num_begun = num_refused = 0
print("ready", flush=True)
duration_s = float(sys.stdin.readline())
end = time.monotonic() + duration_s
while time.monotonic() < end or num_begun < 20:
    with account.open() as counts:
        has_begun = counts.has_room(1, limit)
        counts.add_running(int(has_begun))
        assert counts.num_running <= limit, counts.num_running
    num_begun += has_begun
    num_refused += not has_begun
    time.sleep(0.002 if has_begun else 0.0002)
    if has_begun:
        with account.open() as counts:
            counts.add_running(-1)
print(num_begun, num_refused)
"""


def test_processes_together_stay_within_a_limit_and_what_a_killed_one_held_comes_back(tmp_path):
    create_shared_counts(tmp_path, NUM_PROCESSES + 1)
    watching = SharedAccounts(ProcessPlace(NUM_PROCESSES, NUM_PROCESSES + 1, str(tmp_path)))
    account = watching.account("tenant", "a")
    processes = [start(number, tmp_path) for number in range(NUM_PROCESSES)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    killed, *others = processes
    # They begin together, however long each took to start; one goes on until it is killed.
    for process, duration_s in zip(processes, (60, *[1] * len(others)), strict=True):
        process.stdin.write(f"{duration_s}\n")
        process.stdin.flush()
    while True:  # until it holds a place
        with account.open() as counts:
            if counts._running[0]:
                killed.kill()  # it waits for the lock, or sleeps
                break
    killed.communicate(timeout=30)
    results = [process.communicate(timeout=60) for process in others]
    assert [process.returncode for process in others] == [0] * len(others), results
    begun, refused = zip(*(map(int, output.split()) for output, _ in results), strict=True)
    assert min(begun) >= 20
    assert sum(refused) > 0
    with account.open() as counts:
        assert counts.has_room(LIMIT, LIMIT)
    watching.close()


def start(number: int, folder: Path) -> "subprocess.Popen[str]":
    arguments = map(str, (number, NUM_PROCESSES + 1, LIMIT, folder))
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
