#!/usr/bin/env bash
# One node of a run on a cluster: a bootstrap node on rank 0, and one peer on every node, with local DDP over its GPUs.
# Start it once a node, with what schedulers set:
#
#   RANK or SLURM_NODEID                number of this node; 0 also runs the bootstrap node
#   WORLD_SIZE or SLURM_JOB_NUM_NODES   number of nodes
#   MASTER_ADDR                         host name or IPv4 address of node 0 (default: the first of SLURM_JOB_NODELIST)
#   NPROC_PER_NODE or SLURM_GPUS_ON_NODE   DDP ranks of a node (default: one per visible GPU)
#   SPES_SHARED    folder that all nodes see: addresses go through it, logs and outputs go there (required)
#   SPES_CONFIG    the run: a YAML file or the name of a bundled config (required)
#   SPES_DATA      folder of the run's token shards; with data.source=local this node's own (without it the bootstrap
#                  node takes data.path of the config, and the peers fetch from it; not with data.source=local)
#   SPES_ROUNDS    stop when the run has committed this round (default: go on until told to stop)
#   SPES_PORT      TCP port of the bootstrap node (default: 31337)
#   SPES_PROGRAM   the program (default: spes-p2p, on the PATH); of a clone that all nodes see, where scripts/venv.sh was
#                  run once: /shared/spes-p2p/.venv/bin/spes-p2p
#
# Further arguments are overrides, the same on every node: run_cluster.sh optimizer.lr=5e-4 output.tensorboard=true
# A node that is started again with the same SPES_SHARED goes on where it stopped.
set -euo pipefail

say() { printf 'run_cluster: %s\n' "$*" >&2; }
die() { say "error: $1 / fix: $2"; exit 2; }

: "${SPES_SHARED:?set SPES_SHARED to a folder that all nodes see}"
: "${SPES_CONFIG:?set SPES_CONFIG to the YAML file of the run, or to the name of a bundled config such as small}"
program="${SPES_PROGRAM:-spes-p2p}"
port="${SPES_PORT:-31337}"
rank="${RANK:-${SLURM_NODEID:-}}"
nodes="${WORLD_SIZE:-${SLURM_JOB_NUM_NODES:-}}"
[[ "$rank" =~ ^[0-9]+$ ]] || die "RANK is '$rank'" "set RANK (0 to nodes - 1), or start it with srun"
[[ "$nodes" =~ ^[1-9][0-9]*$ ]] || die "WORLD_SIZE is '$nodes'" "set WORLD_SIZE to the number of nodes"
((rank < nodes)) || die "RANK is $rank of $nodes nodes" "count nodes from 0"
master="${MASTER_ADDR:-}"
if [ -z "$master" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    master="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
fi
[ -n "$master" ] || die "MASTER_ADDR is empty" "set it to the host name or address of node 0"
ranks="${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"

# What the scheduler set is meant for one world over all nodes. Here every node is a world of its own: the peer makes its
# own local ranks, and must not take itself for a rank of somebody else's.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT NPROC_PER_NODE

mkdir -p "$SPES_SHARED"
address_file="$SPES_SHARED/initial-peer"
children=()
stop() {
    trap - TERM INT
    ((${#children[@]} == 0)) || kill -TERM "${children[@]}" 2>/dev/null || true
    wait
}
trap stop TERM INT EXIT

dns() { [[ "$master" =~ ^[0-9.]+$ ]] && echo ip4 || echo dns4; }

if ((rank == 0)); then
    rm -f "$address_file"
    arguments=(bootstrap --config "$SPES_CONFIG" --output "$SPES_SHARED/bootstrap"
        --host-maddrs "/ip4/0.0.0.0/tcp/$port" --announce-maddrs "/$(dns)/$master/tcp/$port")
    [ -z "${SPES_DATA:-}" ] || arguments+=(--data "$SPES_DATA")
    log="$SPES_SHARED/bootstrap.log"
    "$program" "${arguments[@]}" "swarm.min_peers=$nodes" "$@" >"$log" 2>&1 &
    node=$!
    children+=("$node")
    # Its join command says the address, once peers can come.
    until address="$(grep -o -m 1 -- '--initial-peers [^ ]*' "$log")"; do
        kill -0 "$node" 2>/dev/null || { tail -n 5 "$log" >&2; die "the bootstrap node ended" "see $log"; }
        sleep 0.2
    done
    printf '%s\n' "${address#--initial-peers }" >"$address_file.partial"
    mv "$address_file.partial" "$address_file"
fi

say "node $rank of $nodes waits for the bootstrap node on $master"
until [ -s "$address_file" ]; do sleep 0.2; done

# Only what is not published with the run: the rest reaches peers with its config.
own=()
for override in "$@"; do
    case "$override" in
        output.* | data.source=* | data.raw_dtype=* | eval.include_path=*) own+=("$override") ;;
    esac
done
arguments=(join --initial-peers "$(cat "$address_file")" --output "$SPES_SHARED/peer-$rank")
[ -z "${SPES_DATA:-}" ] || arguments+=(--data "$SPES_DATA")
[ -z "$ranks" ] || arguments+=(--local-ranks "$ranks")
[ -z "${SPES_ROUNDS:-}" ] || arguments+=(--until-round "$SPES_ROUNDS")
"$program" "${arguments[@]}" "${own[@]}" &
peer=$!
children=("$peer" "${children[@]}")
code=0
wait "$peer" || code=$?
say "the peer of node $rank ended with $code"
exit "$code"
