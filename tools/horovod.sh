#!/bin/sh
# Builds Horovod for PyTorch on gloo and installs it: tools/horovod.sh PYTHON [FOLDER]
#
# PYTHON is that of an environment with torch and numpy. The wheel is kept in FOLDER (build/horovod), and built only
# once. Needs a C++ compiler. Horovod has no wheels, and its last release (0.28.1, 2023) does not build as it is:
#
# - torch's headers want C++ 17, and two of Horovod's CMake files say 14
# - its CMake files say a version that CMake 4 no longer takes; its setup.py imports what setuptools 81 has no more
# - the build must see the environment's torch, so it is not isolated
set -eu
# Pins of gpuctl's own environment would rule out what the build needs.
unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT

python=$1
folder=${2:-build/horovod}
version=0.28.1

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
torch=$("$python" -c 'import sys, torch; print(torch.__version__.replace("+", "_"), "cp%d%d" % sys.version_info[:2], sep="-")')
wheels=$folder/$torch
if ! ls "$wheels"/horovod-*.whl >/dev/null 2>&1; then
    "$python" -m pip install --quiet 'setuptools<81' 'cmake<4' wheel psutil pyyaml cloudpickle packaging
    work=$(mktemp -d "$folder/build.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    PATH=$(dirname "$python"):$PATH
    export PATH
    "$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary horovod --dest "$work" "horovod==$version"
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    source=$work/horovod-$version
    sed -i 's/\(CMAKE_CXX_STANDARD\) 14/\1 17/' "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/wheels" "$source"
    mv "$work/wheels" "$wheels"
fi
"$python" -m pip install --quiet --no-deps "$wheels"/horovod-*.whl
"$python" -m pip install --quiet cloudpickle pyyaml psutil packaging
