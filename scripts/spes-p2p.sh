#!/usr/bin/env bash
# spes-p2p of this clone, from any folder; the first call installs it into .venv (a few minutes).
# scripts/spes-p2p.sh join spes1...
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
"$here/venv.sh"
export SPES_CALLED_AS="$0"  # so that commands which the program prints can be typed as they stand
exec "$here/../.venv/bin/spes-p2p" "$@"
