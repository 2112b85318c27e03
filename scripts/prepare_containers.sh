#!/usr/bin/env bash
# Makes sure that a Docker engine runs, that docker-compose is there, and that the base images of
# Dockerfile and docker-compose.yml exist. Images that cannot be pulled are made from Debian's
# packages, under the same names.
#
# Usage: prepare_containers.sh          prints variables for docker-compose, one NAME=VALUE a line
#        prepare_containers.sh --stop   ends the engine that this script started
#
# Exit status 3: this machine cannot run containers; the last line of stderr is the reason.
# BATON_CONTAINERS is the folder for the engine's files and the logs.
set -euo pipefail

readonly CANNOT=3
readonly PYTHON_IMAGE=python:3.11-slim REDIS_IMAGE=redis:7-alpine
readonly TORCH_INDEXES=(https://download.pytorch.org/whl/cpu https://pypi.org/simple)
readonly CERTIFICATES=/etc/ssl/certs/ca-certificates.crt
readonly DOCKERFILES=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/containers
readonly STATE=${BATON_CONTAINERS:-/var/tmp/baton-containers}
PATH=/usr/bin:/usr/sbin:$PATH # distributions' own programs first

cannot() {
    echo "no containers here: $1" >&2
    exit "$CANNOT"
}

stop_engine() {
    local pid
    [[ -w $STATE/dockerd.pid ]] || return 0 # none, or that of another user
    pid=$(<"$STATE/dockerd.pid")
    # After a restart of the machine another process may have the number.
    if [[ $(cat "/proc/$pid/comm" 2>/dev/null) == dockerd ]]; then
        kill "$pid" 2>/dev/null || true
        for _ in {1..120}; do kill -0 "$pid" 2>/dev/null || break; sleep 0.5; done
    fi
    rm -f "$STATE/dockerd.pid"
}

need_root_on_debian() {
    [[ $(id -u) = 0 ]] || cannot "$1, which takes root"
    command -v apt-get >/dev/null && [[ -r /etc/debian_version ]] || cannot "$1, which takes Debian"
}

# Installs the Debian packages that have the programs, given as PROGRAM:PACKAGE.
install_programs() {
    local missing=() pair
    for pair; do command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}"); done
    ((${#missing[@]})) || return 0
    need_root_on_debian "${missing[*]} must be installed"
    { apt-get update --quiet --quiet && DEBIAN_FRONTEND=noninteractive apt-get install --quiet \
        --yes --no-install-recommends "${missing[@]}"; } >"$STATE/apt.log" 2>&1 \
        || cannot "${missing[*]} cannot be installed: $(tail -n 1 "$STATE/apt.log")"
}

start_engine() {
    need_root_on_debian "no Docker engine runs, and one must be started"
    install_programs dockerd:docker.io iptables:iptables
    setsid dockerd --data-root "$STATE/data" >"$STATE/dockerd.log" 2>&1 </dev/null &
    echo $! >"$STATE/dockerd.pid"
    for _ in {1..120}; do docker info >/dev/null 2>&1 && return; sleep 0.5; done
    stop_engine
    cannot "dockerd does not start: $(tail -n 1 "$STATE/dockerd.log")"
}

has_image() { docker image inspect "$1" >/dev/null 2>&1; }

pull() { timeout 120 docker pull --quiet "$1" >/dev/null 2>"$STATE/pull.log"; }

# The settings of this machine's pip, except what names files that the image would not have.
# Folders of wheels (find-links) are copied into the file system $1.
write_pip_settings() {
    local root=$1 key value links=()
    echo '[global]'
    while IFS='=' read -r key value; do
        value=${value#\'} value=${value%\'}
        case ${key##*.} in
            index-url | trusted-host | timeout | default-timeout)
                [[ $value == *file:* ]] || echo "${key##*.} = $value" ;;
            extra-index-url)
                [[ $value == *file:* ]] || echo "extra-index-url = $value" ;;
            find-links)
                [[ ! -d $value || " ${links[*]-} " == *" $value "* ]] || links+=("$value") ;;
        esac
    done < <(python3 -m pip config list 2>/dev/null || true)
    for value in "${links[@]}"; do
        mkdir -p "$root$value"
        cp -r "$value/." "$root$value"
    done
    ((${#links[@]} == 0)) || echo "find-links = ${links[*]}"
    [[ ! -f $CERTIFICATES ]] || echo "cert = $CERTIFICATES"
}

# Copies apt's sources that name the mirror $1 into the file system $2; others can need keys that
# it lacks.
copy_sources() {
    local mirror=$1 folder=$2/etc/apt file
    rm -f "$folder/sources.list"
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
        [[ ! -f $file ]] || ! grep --quiet "$mirror" "$file" || cp "$file" "$folder/sources.list.d/"
    done
}

make_python_image() {
    local root mirror suite
    need_root_on_debian "$PYTHON_IMAGE cannot be pulled and must be made"
    install_programs debootstrap:debootstrap
    root=$(mktemp --directory "$STATE/root.XXXX")
    trap "rm -rf '$root'" EXIT
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
    mirror=${mirror%/}
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    debootstrap --variant=minbase --include=python3-dev,python3-venv,python3-pip,ca-certificates \
        "$suite" "$root" "$mirror" >"$STATE/debootstrap.log" 2>&1 \
        || cannot "debootstrap failed: $(tail -n 1 "$STATE/debootstrap.log")"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    copy_sources "$mirror" "$root"
    [[ ! -f $CERTIFICATES ]] || cp -L "$CERTIFICATES" "$root$CERTIFICATES"
    write_pip_settings "$root" >"$root/etc/pip.conf"
    ln -sf /usr/bin/python3 "$root/usr/local/bin/python"
    ln -sf /usr/bin/pip3 "$root/usr/local/bin/pip"
    tar -C "$root" --create . | docker import --change 'CMD ["python3"]' - "$PYTHON_IMAGE" >/dev/null
}

make_redis_image() {
    docker build --quiet --network host --tag "$REDIS_IMAGE" "$DOCKERFILES/redis" >/dev/null \
        2>"$STATE/redis.log" || cannot "$REDIS_IMAGE: $(tail -n 1 "$STATE/redis.log")"
}

# The first index of torch that answers.
torch_index() {
    local index
    for index in "${TORCH_INDEXES[@]}"; do
        ! python3 - "$index/torch/" 2>/dev/null <<'PYTHON' || break
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=10)
PYTHON
    done
    echo "$index"
}

if [[ ${1:-} == --stop ]]; then
    stop_engine
    exit
fi
mkdir -p "$STATE" 2>/dev/null || cannot "$STATE cannot be written"
# Two runs at once would both start an engine. The lock is not the engine's, which outlives this.
if [[ ${1:-} != --locked && -w $STATE ]] && command -v flock >/dev/null; then
    exec flock --close "$STATE/lock" "$BASH" "$0" --locked
fi
docker info >/dev/null 2>&1 || start_engine
install_programs docker-compose:docker-compose
has_image "$PYTHON_IMAGE" || pull "$PYTHON_IMAGE" || make_python_image
has_image "$REDIS_IMAGE" || pull "$REDIS_IMAGE" || make_redis_image
echo "TORCH_INDEX_URL=$(torch_index)"
