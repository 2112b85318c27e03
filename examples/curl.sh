#!/bin/sh
# Every endpoint that answers a prompt or a chat, with curl:
#
#   baton serve                                       # or `make run`, in another terminal
#   sh examples/curl.sh [URL [MODEL]]
set -eu
url=${1:-http://127.0.0.1:8000}
model=${2:-demo}

post() {
    printf '\n%s\n' "$1"
    curl --silent --show-error --fail-with-body --no-buffer "$url$1" \
        --header 'Content-Type: application/json' --data "$2"
    echo
}

curl --silent --show-error --fail "$url/v1/models"
echo
post /v1/completions '{"model": "'"$model"'", "prompt": "Open the file", "max_tokens": 16}'
post /v1/chat/completions '{"model": "'"$model"'", "max_tokens": 16, "stream": true,
  "stream_options": {"include_usage": true},
  "messages": [{"role": "user", "content": "How do I open a file?"}]}'
post /v1/chat/completions '{"model": "'"$model"'", "max_tokens": 16,
  "messages": [{"role": "user", "content": "Is it open?"}],
  "structured_outputs": {"choice": ["yes", "no"]}}'
post /v1/responses '{"model": "'"$model"'", "max_output_tokens": 16, "input": "Return the"}'
post /v1/messages '{"model": "'"$model"'", "max_tokens": 16,
  "messages": [{"role": "user", "content": "How do I open a file?"}]}'
post /v1/messages/count_tokens '{"model": "'"$model"'",
  "messages": [{"role": "user", "content": "How do I open a file?"}]}'
post /tokenize '{"model": "'"$model"'", "prompt": "Open the file"}'
