#!/bin/sh
# Sees to a redis-server on PATH: on Debian as root installs the package, else says how.
set -eu

if command -v redis-server >/dev/null; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update --quiet --quiet
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes --no-install-recommends \
        redis-server
    exit 0
fi
cat >&2 <<'MESSAGE'
The tests need a real redis-server on PATH. Install one:
    Debian, Ubuntu   sudo apt-get install redis-server
    Fedora           sudo dnf install valkey-compat-redis
    macOS            brew install redis
MESSAGE
exit 1
