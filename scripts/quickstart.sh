#!/usr/bin/env bash
# From a fresh clone to a model that several peers trained together, in one command.
# Arguments go to `spes-p2p quickstart`: scripts/quickstart.sh --peers 4 --rounds 10
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/venv.sh
exec .venv/bin/spes-p2p quickstart "$@"
