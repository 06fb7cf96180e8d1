#!/usr/bin/env bash
# A bootstrap node for a real host: fixed port, fixed identity, and arguments from environment variables, so that a
# restart gives the same address. Restarts and logs are the service manager's: spes-p2p-bootstrap.service, Containerfile.
#
#   SPES_CONFIG    the run: a YAML file or the name of a bundled config (required the first time and ever after)
#   SPES_MIRROR    instead: the invitation to a run that somebody else began, to serve it without a say in it
#   SPES_DATA      folder of the run's token shards (leave it out with data.source=local)
#   SPES_FOLDER    identity, genesis and certificates: keep it (default: ./bootstrap-node)
#   SPES_ARCHIVE   folder that keeps the newest state too, so that the run outlives its peers
#   SPES_SERVE     1: reduce and hold for peers behind NAT too (not with SPES_ARCHIVE)
#   SPES_PORT      TCP port (default: 31337)
#   SPES_ANNOUNCE  multiaddresses that others should dial, separated by spaces, such as /dns4/host.example.org/tcp/31337,
#                  or /dnsaddr/run.example.org for whatever nodes the TXT records of that name list
#   SPES_PROGRAM   the program (default: spes-p2p)
#
# Further arguments go to `spes-p2p bootstrap`, such as overrides: run_bootstrap.sh swarm.min_peers=4
set -euo pipefail

if [ -n "${SPES_MIRROR:-}" ]; then
    run=(--mirror "$SPES_MIRROR")
else
    run=(--config "${SPES_CONFIG:?set SPES_CONFIG to the YAML file of the run, or to the name of a bundled config such as tiny}")
fi
folder="${SPES_FOLDER:-bootstrap-node}"
port="${SPES_PORT:-31337}"

arguments=(
    bootstrap
    "${run[@]}"
    --output "$folder"
    --identity-path "$folder/identity.key"
    --port "$port"
)
if [ -n "${SPES_DATA:-}" ]; then
    arguments+=(--data "$SPES_DATA")
fi
if [ -n "${SPES_ARCHIVE:-}" ]; then
    arguments+=(--archive "$SPES_ARCHIVE")
fi
if [ "${SPES_SERVE:-0}" = 1 ]; then
    arguments+=(--serve)
fi
for address in ${SPES_ANNOUNCE:-}; do
    arguments+=(--announce-maddrs "$address")
done

# exec: signals of the service manager reach the node itself
exec "${SPES_PROGRAM:-spes-p2p}" "${arguments[@]}" "$@"
