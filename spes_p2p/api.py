"""The handful of names for programs of one's own, `Run`, `Peer`, `Swarm` and more; docs/api.md shows them at work.

Thin on purpose: the command line calls the same functions of `peer`. `spes_p2p` hands these names out on first use, so
that importing the package stays cheap. Errors are those of `spes_p2p.errors`, each with the fix.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from typing import Any

from spes_p2p.config.fingerprint import fingerprint
from spes_p2p.config.load import load_config
from spes_p2p.config.schema import Config
from spes_p2p.interop import evaluate as harness
from spes_p2p.interop.card import Facts
from spes_p2p.observe.events import Event, EventBus
from spes_p2p.peer.bootstrap import BootstrapOptions, serve_until, with_start_folder
from spes_p2p.peer.export import ExportOptions, run_export
from spes_p2p.peer.network import visit
from spes_p2p.peer.options import DEFAULT_HOST_MADDRS, NetworkOptions, PeerOptions, config_path, meeting
from spes_p2p.peer.run import run_peer
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread
from spes_p2p.sync.report import RunReport, read_report

__all__ = ["Peer", "Run", "Swarm", "evaluate"]

Say = Callable[[str], None]


def _nothing(text: str) -> None:
    """Says nothing."""


class Run:
    """A run as its organiser sees it: a config, and a bootstrap node for it."""

    def __init__(self, config: str | Path, *overrides: str) -> None:
        """`config` is a YAML file or the name of a bundled one; `overrides` as on the command line."""
        self.path = Path(config)
        self.overrides = overrides
        self.config: Config = load_config(config_path(self.path), overrides)

    @property
    def fingerprint(self) -> str:
        """Hex hash of the config fields that all peers must share. A run's also covers dataset and organiser."""
        return fingerprint(self.config).hex()

    @contextmanager
    def bootstrap(
        self,
        folder: Path | str,
        data: Path | str | None = None,
        host_maddrs: tuple[str, ...] = DEFAULT_HOST_MADDRS,
        init_from: Path | None = None,
        say: Say = _nothing,
    ) -> Iterator[str]:
        """Runs a bootstrap node in this process while the block runs; yields the address at which peers join."""
        network = NetworkOptions(host_maddrs=host_maddrs)
        options = BootstrapOptions(
            network, Path(folder), self.path, None if data is None else str(data), self.overrides, init_from=init_from,
        )  # fmt: skip
        options = with_start_folder(options, say)
        ready, said = Flag(), list[str]()

        def on_ready(command: str) -> None:
            said.append(command)
            ready.set()

        with NetworkThread() as thread:
            stop = asyncio.Event()
            serving = thread.submit(serve_until(stop, options, say, on_ready))
            try:
                while not ready.wait(0.05):
                    if serving.done():
                        serving.result()
                words = shlex.split(said[0])
                yield words[words.index("--initial-peers") + 1]
            finally:
                thread.loop.call_soon_threadsafe(stop.set)
                serving.result()


class Peer:
    """This machine as a peer of a run."""

    def __init__(
        self,
        initial_peers: str | tuple[str, ...],
        folder: Path | str = "peer",
        host_maddrs: tuple[str, ...] = DEFAULT_HOST_MADDRS,
        **options: Any,
    ) -> None:
        """`initial_peers`: addresses of live nodes, or an invitation.

        `options`: further fields of `spes_p2p.peer.options.PeerOptions`, such as `data`, `max_experts`.
        """
        words = (initial_peers,) if isinstance(initial_peers, str) else tuple(initial_peers)
        run = meeting((), words, options.pop("run_id", None), options.pop("fingerprint", None))
        options |= {
            "run_id": run.run_id,
            "fingerprint": run.fingerprint,
            "organiser": run.organiser,
            "token": run.token,
        }
        network = NetworkOptions(run.addresses, host_maddrs)
        if options.get("data") is not None:
            options["data"] = str(options["data"])
        self._options = PeerOptions(network=network, folder=Path(folder), **options)

    @property
    def folder(self) -> Path:
        """State, checkpoints and metrics of this peer."""
        return self._options.folder

    def train(self, on_event: Callable[[Event], None] = lambda event: None, say: Say = _nothing) -> None:
        """Trains until `until_round` of the options are committed, or Ctrl-C. `on_event` gets every event."""
        bus = EventBus(_Caller(on_event))
        try:
            last_words = run_peer(self._options, bus, say, lambda running: None)
        finally:
            bus.close()
        if last_words:
            say(last_words)


class Swarm:
    """A run as anybody sees it who knows the address of one live node."""

    def __init__(
        self, initial_peers: str | tuple[str, ...], run_id: str | None = None, fingerprint: str | None = None
    ) -> None:
        """`initial_peers`: addresses, or an invitation."""
        words = (initial_peers,) if isinstance(initial_peers, str) else tuple(initial_peers)
        self._run = meeting((), words, run_id, fingerprint)

    def status(self) -> RunReport:
        """Round, peers, columns with their owners, the newest certificate. Raises NetworkError."""
        run = self._run

        async def read(network: HivemindNetwork) -> RunReport:
            return await read_report(network, run.run_id, time.time(), run.fingerprint, run.addresses)

        return visit(run, read)

    def export(self, output: Path | str, tokenizer: str | None = None, say: Say = _nothing, **options: Any) -> Facts:
        """The newest state as a Hugging Face folder; `options`: further fields of `ExportOptions`, such as `dtype`."""
        return run_export(ExportOptions(Path(output), None, self._run, tokenizer=tokenizer, **options), say)


def evaluate(
    folder: Path | str, suite: str = "quick", include_path: Path | None = None, **options: Any
) -> dict[str, Any]:
    """What lm-evaluation-harness says of a Hugging Face folder; `options` as of `interop.evaluate.evaluate`."""
    return harness.evaluate(Path(folder), harness.find_tasks(suite, include_path), **options)


class _Caller:
    """A sink that hands events to a function."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event

    def write(self, time: float, event: Event) -> None:
        self._on_event(event)

    def close(self) -> None:
        """Nothing to close."""
