#!/bin/sh
# As root on Debian: installs Node, Go, Ruby, nginx, HAProxy and Chromium, unless they are there, and builds
# the client programs of the tests. What cannot be had is named and left out: tests whose tools are missing
# skip themselves.
set -eu
cd "$(dirname "$0")/.."

# The packages whose file is missing, as FILE:PACKAGE.
missing() {
    for pair; do
        command -v "${pair%%:*}" >/dev/null || [ -e "${pair%%:*}" ] || echo "${pair##*:}"
    done
}

packages=$(missing node:nodejs npm:npm go:golang-go protoc:protobuf-compiler \
    protoc-gen-go:protoc-gen-go-1-5 protoc-gen-go-grpc:protoc-gen-go-grpc \
    /usr/share/gocode/src/google.golang.org/grpc:golang-google-grpc-dev \
    /usr/share/gocode/src/github.com/golang/protobuf/proto/registry.go:golang-github-golang-protobuf-1-5-dev \
    grpc_tools_ruby_protoc:ruby-grpc-tools nginx:nginx-light haproxy:haproxy chromium:chromium)
if [ -n "$packages" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # RUNLEVEL keeps the proxies from being started as services.
    { apt-get update --quiet --quiet && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install \
        --quiet --quiet --yes --no-install-recommends $packages; } \
        || echo "these packages could not be installed:" $packages >&2
fi
exec python3 -m tests.support.grpc_clients.builds
