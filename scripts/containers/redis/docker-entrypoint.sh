#!/bin/sh
# As in the official image: options alone mean redis-server, which does not run as root and has no
# protected mode.
set -e
case $1 in -*) set -- redis-server "$@" ;; esac
if [ "$1" = redis-server ]; then
    set -- "$@" --protected-mode no
    [ "$(id -u)" != 0 ] || exec setpriv --reuid=redis --regid=redis --clear-groups "$@"
fi
exec "$@"
