#!/usr/bin/env bash
# Makes $VENV with everything that building, running and testing mkernel needs.
# System packages that are missing are installed where this user may (root, apt), else named in one line.
set -euo pipefail

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

missing=()
need() { # need PACKAGE TEST...: the Debian package that provides what TEST checks
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}
has_header() { echo "#include <$1>" | g++ -E -x c++ -; }

need python3 "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))'
need python3-venv "$PYTHON" -c 'import ensurepip, venv'
need python3-dev "$PYTHON" -c 'import sysconfig, os, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'
need g++ g++ --version
need cmake cmake --version
need libibverbs-dev has_header infiniband/verbs.h

if ((${#missing[@]})); then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        echo "installing ${missing[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
    else
        echo "missing: ${missing[*]}; install with: apt-get install ${missing[*]}" >&2
        exit 1
    fi
fi

echo "making $VENV (the first time takes minutes: torch is large)"
"$PYTHON" -m venv "$VENV"
pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
# The build's requirements stay in the venv: rebuilds need no network and reuse the build folder.
"${pip[@]}" "scikit-build-core>=0.11" "pybind11>=2.13" ninja
# What the package and its extras ask for, read from pyproject.toml, so that it is said once.
"$VENV/bin/python" - > "$VENV/requirements.txt" <<'PY'


try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import pip._vendor.tomli as tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
print("\n".join(dict.fromkeys(wanted)))
PY
"${pip[@]}" -r "$VENV/requirements.txt"
