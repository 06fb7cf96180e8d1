#!/usr/bin/env python3
"""A round over shaped links: bytes beside the formula, sync time beside what the links allow, and time spent training.

    sudo python scripts/bench_wan.py                      # 4 peers that can be dialled, 100/20 Mbit/s
    sudo python scripts/bench_wan.py --public 2 --homes 4 --delay-ms 20
    sudo python scripts/bench_wan.py --sync sync.overlap=true --step-seconds 0.5

Real peers in network namespaces of this machine, links of token buckets (tc tbf), homes behind routers of their own
(`tests/swarm/nat_box.py`), which also delay what they carry, each way; peers outside a home have no delay. The
limit of a sync is the most that any peer must move over the slower direction of its link, by what it really moved.
Time spent training is that of the steps made between the first and the last commit that are looked at, of all time.
With `--step-seconds` each step sleeps so long on top of its computing: the cores of one machine are not the limit then.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from spes_p2p.codecs.sizes import CODECS, Codec
from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.failpoints import INNER_STEP
from spes_p2p.observe.events import Round, Step
from spes_p2p.planning.sizes import Sizes
from spes_p2p.planning.traffic import Spread, round_traffic
from spes_p2p.quickstart.first_run import CONFIG, QuickstartOptions, prepare
from spes_p2p.quickstart.processes import Process
from tests.simulation.faults import SLOW, Fault
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.namespaces import Lab, may_limit_links

PORT = 4001
MODEL = (
    "model.d_model=192", "model.num_layers=4", "model.num_heads=4", "model.expert_ffn=256", "model.num_experts=8",
    "data.sequence_length=64", "optimizer.batch_sequences=4", "sync.merge_alpha=0", "eval.sequences=1",
)  # fmt: skip
"""5.4 million parameters, 0.7 of them shared: 18 MB up a round for each of four peers in fp32."""
WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """One peer over the rounds after warm-up: mean bytes of a round, medians of times."""

    name: str
    bytes_up: float
    bytes_down: float
    train_seconds: float
    sync_seconds: float
    phases: dict[str, float]
    busy: float
    """Share of the time that went into inner steps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--public", type=int, default=4, help="peers that can be dialled")
    parser.add_argument("--homes", type=int, default=0, help="peers behind NAT")
    parser.add_argument("--up", type=float, default=20.0, help="Mbit/s")
    parser.add_argument("--down", type=float, default=100.0, help="Mbit/s")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="of homes, each way")
    parser.add_argument("--steps", type=int, default=20, help="inner steps a round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--codecs", nargs="+", default=["fp32"], choices=CODECS)
    parser.add_argument("--sync", nargs="*", default=[], help="changes of the run, such as sync.overlap=true")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="what each step sleeps")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # peers and namespaces go first
    if not may_limit_links():
        print("bench_wan.py needs root, iproute2 and a kernel with network namespaces and token buckets (tbf)")
        return 1
    print(f"{arguments.public} peers that can be dialled, {arguments.homes} behind NAT")
    print(f"links of {arguments.down:g}/{arguments.up:g} Mbit/s, {2 * arguments.delay_ms:g} ms to and fro from a home")
    for codec in arguments.codecs:
        _show(codec, arguments, _run(codec, arguments))
    return 0


def _run(codec: str, arguments: argparse.Namespace) -> list[Measured]:
    peers = arguments.public + arguments.homes
    overrides = (*MODEL, f"sync.steps_per_round={arguments.steps}", f"sync.codec={codec}", *arguments.sync)
    faults = [Fault(INNER_STEP, SLOW, times=0, seconds=arguments.step_seconds)] if arguments.step_seconds else []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-wan-"))) / "swarm"
        options = QuickstartOptions(folder, peers, arguments.rounds, overrides=overrides)
        data, _, agreed, local = prepare(options, lambda text: None)
        lab = Lab(stack)
        hosts = {"bootstrap": lab.host("bootstrap", "net", "11.0.0.10")}
        for at in range(arguments.public):
            hosts[f"public-{at}"] = lab.host(f"public-{at}", "net", f"11.0.0.{20 + at}")
        doors = [f"{host.address}:{PORT}" for host in hosts.values()]
        for at in range(arguments.homes):
            name, delay = f"home-{at}", arguments.delay_ms / 1000
            hosts[name] = lab.home(name, "net", f"11.0.0.{101 + at}", doors, delay)
        names = [name for name in hosts if name != "bootstrap"]
        for name in names:
            lab.limit(name, int(1000 * arguments.up), int(1000 * arguments.down))
        swarm = stack.enter_context(FaultySwarm(folder, hosts=hosts))
        swarm.bootstrap(CONFIG, data, [*agreed, "--host-maddrs", f"/ip4/11.0.0.10/tcp/{PORT}"])
        for name in names:
            listen = ["--host-maddrs", f"/ip4/{hosts[name].address}/tcp/{PORT}"] if "public" in name else []
            limits = ["--max-upload", f"{arguments.up:g}Mbit"]
            swarm.peer(name, data, [*local, *limits, *listen], faults=faults)
        swarm.wait_for_round(arguments.rounds, names, 1800.0)
        return [_measured(swarm.processes[name], arguments.step_seconds) for name in names]


def _measured(peer: Process, slept_seconds: float) -> Measured:
    name, late = peer.name, [event for event in peer.rounds() if event.round > WARM_UP]
    times = [at for at, event in peer.seen if isinstance(event, Round) and event.round >= WARM_UP]
    steps = [event for at, event in peer.seen if isinstance(event, Step) and times[0] < at <= times[-1]]
    stepping = sum(step.tokens / step.tokens_per_second + slept_seconds for step in steps)
    trained = [event.seconds.get("train", 0.0) for event in late]
    synced = [sum(event.seconds.values()) - event.seconds.get("train", 0.0) for event in late]
    phases = [phase for phase in late[0].seconds if phase != "train"]
    return Measured(
        name,
        statistics.mean(event.bytes_sent for event in late),
        statistics.mean(event.bytes_received for event in late),
        statistics.median(trained),
        statistics.median(synced),
        {phase: statistics.median(event.seconds.get(phase, 0.0) for event in late) for phase in phases},
        stepping / (times[-1] - times[0]),
    )


def _formula(codec: Codec, arguments: argparse.Namespace) -> tuple[float, float]:
    """Bytes up and down."""
    peers = arguments.public + arguments.homes
    overrides = [*MODEL, f"sync.steps_per_round={arguments.steps}", *arguments.sync]
    config = load_config(bundled_config(CONFIG), overrides)
    sizes, sync = Sizes.of(config.model), config.sync
    spread = Spread(peers, sizes.num_experts / peers, 1.0, sizes.num_experts)
    traffic = round_traffic(sizes, spread, sync.expert_rounds, sync.vocabulary_rounds)
    up, down = (way.bytes_in(codec) for way in (traffic.up, traffic.down))
    return up, down


def _show(codec: Codec, arguments: argparse.Namespace, found: list[Measured]) -> None:
    up, down = _formula(codec, arguments)
    sent = statistics.mean(one.bytes_up for one in found)
    limit = max(max(8e-6 * m.bytes_up / arguments.up, 8e-6 * m.bytes_down / arguments.down) for m in found)
    sync = statistics.median(one.sync_seconds for one in found)
    print(f"\n{codec}: {'peer':10} {'up MB':>7} {'down MB':>8} {'train s':>8} {'sync s':>7}")
    for one in found:
        print(f"{'':{len(codec) + 2}}{one.name:10} {one.bytes_up / 1e6:7.1f} {one.bytes_down / 1e6:8.1f} "
              f"{one.train_seconds:8.2f} {one.sync_seconds:7.2f}")  # fmt: skip
    busy = statistics.median(one.busy for one in found)
    print(f"  sent by a peer, mean: {sent / 1e6:.1f} MB; by the formula {up / 1e6:.1f} up, {down / 1e6:.1f} down: "
          f"{sent / up:.3f} of it (target: within 5%)")  # fmt: skip
    print(f"  sync: {sync:.2f} s; the tightest link allows {limit:.2f}: {sync / limit:.2f} times (target 1.25)")
    phases = {phase: statistics.median(one.phases.get(phase, 0.0) for one in found) for phase in found[0].phases}
    print("  of it: " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items()) + " s")
    print(f"  time spent training: {busy:.1%} (target: 95% with overlap, where a sync fits into a round)")


if __name__ == "__main__":
    sys.exit(main())
