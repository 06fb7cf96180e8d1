#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, format, types, import rules, tests. People and CI both run this.
# Arguments go to pytest: scripts/test.sh -m "not swarm" -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/venv.sh dev
bin=.venv/bin

step() { printf '\n== %s\n' "$*" >&2; "$@" </dev/null; }

step $bin/ruff check .
step $bin/ruff format --check .
step $bin/mypy
step $bin/lint-imports --no-logo
# Three files of tests at a time: those with real processes mostly wait. -n 0 among the arguments takes them one by one.
# Tests for a GPU are left out where there is none; an own -m comes later and wins.
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    step $bin/python -m pytest -n 3 --dist loadfile "$@"
else
    step $bin/python -m pytest -n 3 --dist loadfile -m "not gpu" "$@"
fi
