#!/usr/bin/env bash
# Makes .venv at the repository root if it is missing or out of date, with spes-p2p installed in it from this tree.
# Usage: scripts/venv.sh [EXTRAS], e.g. scripts/venv.sh dev. PYTHON names the interpreter (default: python3.11, or the
# next newer one that is found).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras="${1:-}"

say() { printf '%s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "error: no Python 3.11 or newer found / fix: install one, or name it: PYTHON=/path/to/python $0"
    return 1
}

# What was installed is written down, so that a second run with the same needs takes no time.
wanted="$(cat pyproject.toml scripts/constraints.txt | cksum) extras=$extras"
stamp=.venv/.installed
if [ -x .venv/bin/python ] && grep -qxF "$wanted" "$stamp" 2>/dev/null; then
    exit 0
fi

python="$(find_python)"
if [ ! -x .venv/bin/python ]; then
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
fi
pip() {
    .venv/bin/python -m pip --quiet --quiet --log .venv/pip.log --disable-pip-version-check "$@" </dev/null || {
        say "error: not everything could be installed / fix: the end of $PWD/.venv/pip.log says why; then run $0 again"
        return 1
    }
}

installed() { .venv/bin/python -c 'import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))' "$1" 2>/dev/null || true; }

torch="$(grep '^torch==' scripts/constraints.txt)"
if [ "$(installed torch | cut -d + -f 1)" != "${torch#torch==}" ]; then  # 2.13.0+cpu is as good
    say "installing $torch"
    if [ ! -e /dev/nvidia0 ] && [ -z "${PIP_EXTRA_INDEX_URL:-}${PIP_FIND_LINKS:-}" ]; then
        say "without an NVIDIA GPU? the build for CPUs is gigabytes smaller: docs/questions.md#i-have-no-gpu-can-i-help"
    fi
    pip install "$torch"
fi
first="$([ -n "$(installed spes-p2p)" ] || echo ' (a few minutes the first time)')"
say "installing spes-p2p${extras:+[$extras]}$first"
pip install --constraint scripts/constraints.txt --editable ".${extras:+[$extras]}"
printf '%s\n' "$wanted" >>"$stamp"
