#!/usr/bin/env bash
# Replaces the containers of all services by ones of the present image and settings, one at a time,
# while the cluster serves. See docs/compose.md.
#
#   docker-compose build                # or pull, or another BATON_IMAGE or other settings in .env
#   deploy/compose/upgrade.sh docker-compose --profile two-routers
#
# The arguments are the command of compose with its options (default: docker-compose). A worker is
# started beside the others before an old one is stopped, so that memory for one more must be free.
# If a new one does not become healthy, the script ends with status 1, and the old ones serve on.
set -euo pipefail

readonly DRAIN_S=40 START_S=${START_TIMEOUT_S:-600}
readonly RECONNECT_S=5 # clients that found a router closed have tried it again by then
(($#)) || set -- docker-compose
readonly COMPOSE=("$@")
any=$("${COMPOSE[@]}" ps --quiet)
any=${any%%$'\n'*}
[[ -n $any ]] || { echo "no container runs: $*" >&2; exit 1; }
PROJECT=$(docker inspect --format '{{index .Config.Labels "com.docker.compose.project"}}' "$any")
readonly PROJECT

# Prints the ids of a service's running containers; further arguments are filters.
containers() {
    docker ps --quiet --filter "label=com.docker.compose.project=$PROJECT" \
        --filter "label=com.docker.compose.service=$1" "${@:2}"
}

up() { "${COMPOSE[@]}" up --detach --no-deps --no-build "$@"; }

wait_healthy() {
    local service=$1 number=$2 deadline=$((SECONDS + START_S))
    while (($(containers "$service" --filter health=healthy | wc -l) < number)); do
        if ((SECONDS > deadline)); then
            echo "a new container of $service is not healthy: ${COMPOSE[*]} logs $service" >&2
            exit 1
        fi
        sleep 0.5
    done
}

replace_workers() {
    local service=$1 old id number
    old=$(containers "$service")
    number=$(($(wc -w <<<"$old") + 1))
    for id in $old; do
        up --no-recreate --scale "$service=$number" "$service"
        wait_healthy "$service" "$number"
        docker stop --time "$DRAIN_S" "$id" >/dev/null # its streams end, or move to another one
        docker rm "$id" >/dev/null
    done
}

replace() {
    [[ -n $(containers "$1") ]] || return 0
    up "$1"
    wait_healthy "$1" 1
}

replace redis # only if it has changed; KV in it is lost, and computed again
replace_workers prefill
replace_workers decode
if [[ -n $(containers router-2) ]]; then
    replace router-2
    sleep "$RECONNECT_S"
fi
replace router
