#!/bin/sh
# Makes a virtual environment with the first Python >= 3.11 on PATH, or prints how to get one.
# Usage: make_venv.sh FOLDER. The environment variable PYTHON names an interpreter to use instead.
set -eu

folder=$1

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if is_new_enough "$python"; then
        if "$python" -m venv "$folder"; then
            exit 0
        fi
        rm -rf "$folder"
        echo "$python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2
        exit 1
    fi
done
echo "Baton needs Python 3.11 or newer; install one, or name it: make PYTHON=/path/to/python3.11" >&2
exit 1
