#!/bin/sh
# Runs the tests that the expression $1 of marks selects, with the further arguments of pytest:
# first those marked `alone`, then the others in three processes at once.
# The closing line of the second run of pytest is the last line printed.
set -eu
cd "$(dirname "$0")/.."
marks=$1
shift

# Tests start hundreds of processes, each of which would compile Baton's modules anew.
unset PYTHONDONTWRITEBYTECODE

status=5 # pytest's for "no tests were selected"
run_part() {
    part_status=0
    env "$@" || part_status=$?
    case $part_status in
        5) ;;
        0) [ $status = 1 ] || status=0 ;;
        1) status=1 ;;
        *) exit $part_status ;; # interrupted, or pytest could not start
    esac
}

run_part .venv/bin/python -m pytest -m "$marks and alone" "$@"
# Three, since tests wait for other processes and for timeouts during a part of their time. More
# threads than cores would wait for each other. In the order of the folders, the files that take long
# do not come last.
run_part OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
    .venv/bin/python -m pytest --numprocesses 3 --dist loadfile \
    --no-loadscope-reorder -m "$marks and not alone" "$@"
exit $status
