#!/bin/sh
# Makes sure that redis-server is on PATH. As root on Debian it installs the package; elsewhere
# it prints how to install one.
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
