#!/usr/bin/env bash
# A training peer that a service manager or a container engine keeps up: arguments from environment variables, and a
# restart goes on where it stopped.
#
#   SPES_INVITE          the invitation, as the organiser printed it (spes1...)
#   SPES_INITIAL_PEERS   in its place: multiaddresses of live nodes of the run, separated by spaces
#   SPES_DATA            folder with a copy of the run's token shards (default: data comes from other peers)
#   SPES_FOLDER          identity, state and checkpoints: keep it (default: ./peer)
#   SPES_RUN_ID, SPES_FINGERPRINT   which run, where only addresses are given and they know several
#   SPES_PORT            TCP port to listen on (default: a free one)
#   SPES_ANNOUNCE        multiaddresses that others should dial, separated by spaces
#   SPES_CLIENT_MODE     1: listen nowhere (behind NAT)
#   SPES_PROGRAM         the program (default: spes-p2p)
#
# Further arguments go to `spes-p2p join`, such as own choices: run_peer.sh --max-experts 4 output.tensorboard=true
set -euo pipefail

folder="${SPES_FOLDER:-peer}"
arguments=(join)
if [ -n "${SPES_INVITE:-}" ]; then
    arguments+=("$SPES_INVITE")
elif [ -z "${SPES_INITIAL_PEERS:-}" ] && [ ! -e "$folder/invite.txt" ]; then
    echo "run_peer.sh: set SPES_INVITE to the invitation that the organiser printed (spes1...)" >&2
    exit 2
fi
arguments+=(--output "$folder")
for address in ${SPES_INITIAL_PEERS:-}; do
    arguments+=(--initial-peers "$address")
done
if [ -n "${SPES_DATA:-}" ]; then
    arguments+=(--data "$SPES_DATA")
fi
if [ -n "${SPES_RUN_ID:-}" ]; then
    arguments+=(--run-id "$SPES_RUN_ID")
fi
if [ -n "${SPES_FINGERPRINT:-}" ]; then
    arguments+=(--fingerprint "$SPES_FINGERPRINT")
fi
if [ -n "${SPES_PORT:-}" ]; then
    arguments+=(--port "$SPES_PORT")
fi
for address in ${SPES_ANNOUNCE:-}; do
    arguments+=(--announce-maddrs "$address")
done
if [ "${SPES_CLIENT_MODE:-}" = 1 ]; then
    arguments+=(--client-mode)
fi

# exec: signals of the service manager reach the peer itself, which leaves cleanly
exec "${SPES_PROGRAM:-spes-p2p}" "${arguments[@]}" "$@"
