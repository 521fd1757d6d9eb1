#!/usr/bin/env bash
# Makes $VENV, step by step: what building mkernel needs (`tools`), what running it needs (`runtime`), what quick
# tests need (`testing`), and what all tests, linters and the documentation need (`development`). Make compiles
# while torch is on its way.
# System packages that are missing are installed where this user may (root, apt), else named in one line.
set -euo pipefail

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)

missing=()
need() { # need PACKAGE TEST...: the Debian package that provides what TEST checks
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}
has_header() { echo "#include <$1>" | g++ -E -x c++ -; }

system_packages() {
    need python3 "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))'
    need python3-venv "$PYTHON" -c 'import ensurepip, venv'
    need python3-dev "$PYTHON" -c 'import sysconfig, os, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'
    need g++ g++ --version
    need cmake cmake --version
    need libibverbs-dev has_header infiniband/verbs.h

    if ((${#missing[@]})); then
        if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
            echo "installing the Debian packages ${missing[*]}"
            apt-get update -qq
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
        else
            echo "missing: ${missing[*]}; install with: apt-get install ${missing[*]}" >&2
            exit 1
        fi
    fi
}

tools() {
    system_packages
    echo "making $VENV"
    "$PYTHON" -m venv "$VENV"
    # pip reads dependency groups, and dependencies without the package, since 26.3.
    "${pip[@]}" --upgrade "pip>=26.3"
    # The build's requirements stay in the venv: rebuilds need no network and reuse the build folder.
    "${pip[@]}" "scikit-build-core>=0.11" "pybind11>=2.13" ninja
}

runtime() {
    echo "installing torch and the other packages that a run needs (the first time takes minutes: torch is large)"
    "${pip[@]}" torch==2.13.0 # by pip, which looks where its user told it to: the CPU's torch has no other name
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$VENV/bin/python" --requirement pyproject.toml
    else
        "${pip[@]}" --no-build-isolation --only-deps .
    fi
}

group() { # group NAME: one of pyproject.toml's dependency groups
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$VENV/bin/python" --group "$1"
    else
        "${pip[@]}" --group "$1"
    fi
}

testing() { group test; }

development() { group dev; }

"$1"
