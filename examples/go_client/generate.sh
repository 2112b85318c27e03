#!/bin/sh
# Generates the package batonv1 of this module from the repository's .proto files. PROTOS names
# their folder, if it is elsewhere.
set -eu
cd "$(dirname "$0")"
module=example.com/baton-client
files="baton/v1/common.proto baton/v1/generation.proto"
set --
for file in $files; do
    set -- "$@" "--go_opt=M$file=$module/batonv1" "--go-grpc_opt=M$file=$module/batonv1"
done
protoc -I "${PROTOS:-../../protos}" --go_out=. --go_opt=module=$module \
    --go-grpc_out=. --go-grpc_opt=module=$module "$@" $files
