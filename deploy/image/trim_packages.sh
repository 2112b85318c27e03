#!/bin/sh
# Deletes from a virtual environment what no server of Baton reads. It runs in the layer that installs
# the packages: a later layer would hide files, and the image would keep their bytes.
#
# Usage: trim_packages.sh FOLDER
set -eu
environment=$1
cd "$environment"/lib/python3*/site-packages

# With CUDA, Triton and FlashInfer compile at run time, against torch's headers.
if [ ! -e torch/lib/libtorch_cuda.so ]; then
    # A gigabyte, which xgrammar brings and only GPUs use.
    [ ! -d triton ] || "$environment/bin/pip" uninstall --yes triton
    # Of torch's programs, the library starts one; the others are tests, and protoc.
    rm -rf torch/include torch/share torch/test
    [ ! -d torch/bin ] || find torch/bin -type f ! -name torch_shm_manager -delete
    # Symbol tables for linkers and debuggers, a fifth of the largest library. Where binutils is not
    # installed, the libraries are of an earlier layer.
    if command -v strip >/dev/null; then
        strip --strip-unneeded torch/lib/libtorch_cpu.so torch/lib/libtorch_python.so
    fi
fi

# The packages' own tests.
find . -type d -name tests -prune -exec rm -r {} +

# Compiled forms of modules that no server imports. Python makes them again where it may.
for package in mpmath networkx pip pygments setuptools sympy torch/_dynamo torch/_inductor torch/onnx \
    transformers/models; do
    [ ! -d "$package" ] || find "$package" -type d -name __pycache__ -prune -exec rm -r {} +
done
