#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, format, types, import rules, tests. People and CI both run this.
# Arguments go to pytest: scripts/test.sh -m "not swarm" -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/venv.sh dev
bin=.venv/bin

say() { printf '\n== %s\n' "$*" >&2; }
step() { say "$@"; "$@" </dev/null; }

step $bin/ruff check .
step $bin/ruff format --check .
step $bin/lint-imports --no-logo
# Where nothing is cached mypy takes one core for a minute: the tests begin meanwhile.
say $bin/mypy
$bin/mypy </dev/null >&2 &
types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
# Hundreds of processes start: none of them compiles the same files again, even where the environment asks for that.
unset PYTHONDONTWRITEBYTECODE
# Peers sync their disks thousands of times: they do so in memory, where there is room for it.
if [ -z "${PYTEST_DEBUG_TEMPROOT:-}" ] && [ -w /dev/shm ] && [ "$(df --output=avail -k /dev/shm | tail -n 1)" -gt 4000000 ]; then
    export PYTEST_DEBUG_TEMPROOT=/dev/shm
fi
# Three files of tests at a time: those with real processes mostly wait. -n 0 among the arguments takes them one by one.
# The files come in the order of tests/conftest.py, those that take longest first.
# Tests for a GPU are left out where there is none; an own -m comes later and wins.
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    step $bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
else
    step $bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not gpu" "$@"
fi
wait "$types" || { say "mypy has found errors: see above"; exit 1; }
