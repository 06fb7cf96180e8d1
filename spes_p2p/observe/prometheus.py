"""A peer's events as Prometheus metrics, on a port of this machine. docs/metrics.md explains each of them.

Counters count since the peer was started. What is not a number (names, messages, hashes) stays in `metrics.jsonl`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from spes_p2p.errors import ConfigError
from spes_p2p.observe.events import Columns, Error, Eval, Event, ExpertLoad, Pause, Peer, Round, Step, Warning

PREFIX = "spes_p2p"
LOCALHOST = "127.0.0.1"
_PHASE_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """A sink that keeps what Prometheus asks for, in a registry of its own."""

    def __init__(self, run_id: str, peer: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"run_id": run_id, "peer": peer}
        gauge, counter = partial(self._made, Gauge), partial(self._made, Counter)
        histogram = partial(self._made, partial(Histogram, buckets=_PHASE_BUCKETS))
        self._step = gauge("step", "Global step: the committed one plus the own steps of this round.")
        self._loss = gauge("loss", "Training loss of the newest logged step, in nats per token.")
        self._lr = gauge("learning_rate", "Learning rate of the newest logged step.")
        self._grad_norm = gauge("grad_norm", "Gradient norm of the newest logged step, before clipping.")
        self._speed = gauge("tokens_per_second", "Training speed of this peer since the logged step before the newest.")
        self._steps = counter("steps_logged", "Inner steps that were logged.")
        self._trained = counter("step_tokens", "Tokens of all steps up to the newest logged one.")
        self._round = gauge("round", "Newest round that this peer applied.")
        self._roster = gauge("roster_size", "Peers whose work the newest round counted.")
        self._rounds = counter("rounds", "Rounds that this peer applied, by kind of commit.", "commit")
        self._tokens = counter("round_tokens", "Tokens that rounds counted, all peers together.")
        self._lost_tokens = counter("lost_tokens", "Tokens of committed rounds that were lost to another history.")
        self._bytes = counter("bytes", "Bytes to and from other peers in rounds.", "direction", "what")
        self._phase = histogram("phase_seconds", "Duration of the phases of a round.", "phase")
        self._alpha = gauge("merge_alpha", "Alpha of the newest round's merge; 0 when nothing was merged.")
        self._stale = gauge("stale_columns", "Expert columns without a new version in the newest round.")
        self._deadline = gauge(
            "deadline_seconds",
            "Seconds without progress after which the newest round's leader would have been replaced.",
        )
        self._refused = counter("refused_values", "Peers whose values for a slice were refused, summed over rounds.")
        self._load = gauge(
            "expert_load", "Tokens routed to an expert, relative to an even share; mean over layers.", "expert"
        )
        self._most_load = gauge("expert_load_highest", "The highest load of an expert in a layer.")
        self._least_load = gauge("expert_load_lowest", "The lowest load of an expert in a layer.")
        self._held_out = gauge("held_out_loss", "Held-out loss of the newest model that this peer evaluated.")
        self._peers = counter("peer_changes", "Peers that joined, left or were lost.", "change")
        self._adopted = counter("adopted_columns", "Expert columns that this peer has taken over.")
        self._paused = gauge("paused", "1 while this peer is paused.")
        self._warnings = counter("warnings", "Warnings.")
        self._errors = counter("errors", "Errors.")

    def write(self, time: float, event: Event) -> None:
        match event:
            case Step():
                self._write_step(event)
            case Round():
                self._write_round(event)
            case ExpertLoad():
                for expert, load in enumerate(event.mean):
                    self._load.labels(expert=expert, **self._labels).set(load)
                self._most_load.set(max(event.highest, default=0.0))
                self._least_load.set(min(event.lowest, default=0.0))
            case Eval():
                self._held_out.set(event.loss)
            case Peer():
                self._peers.labels(change=event.change, **self._labels).inc()
            case Columns():
                self._adopted.inc(len(event.adopted))
            case Pause():
                self._paused.set(event.paused)
            case Warning():
                self._warnings.inc()
            case Error():
                self._errors.inc()

    def close(self) -> None:
        """The numbers stay as they are."""

    def _write_step(self, event: Step) -> None:
        self._step.set(event.step)
        self._loss.set(event.loss)
        self._lr.set(event.lr)
        self._grad_norm.set(event.grad_norm)
        self._speed.set(event.tokens_per_second)
        self._steps.inc()
        self._trained.inc(event.tokens)

    def _write_round(self, event: Round) -> None:
        self._round.set(event.round)
        self._step.set(event.step)
        self._roster.set(event.roster_size)
        self._alpha.set(event.merge_alpha)
        self._stale.set(len(event.stale_columns))
        self._deadline.set(event.deadline_seconds)
        self._rounds.labels(commit=event.commit, **self._labels).inc()
        self._tokens.inc(event.tokens)
        self._lost_tokens.inc(event.lost_tokens)
        self._refused.inc(len(event.refused))
        for what, sent, received in (
            ("state", event.bytes_sent, event.bytes_received),
            ("data", event.data_bytes_sent, event.data_bytes_received),
        ):
            self._bytes.labels(direction="sent", what=what, **self._labels).inc(sent)
            self._bytes.labels(direction="received", what=what, **self._labels).inc(received)
        for phase, seconds in event.seconds.items():
            self._phase.labels(phase=phase, **self._labels).observe(seconds)

    def _made(self, kind: Callable[..., Any], name: str, words: str, *labels: str) -> Any:
        """With this peer's labels, where there are no others."""
        made = kind(f"{PREFIX}_{name}", words, (*labels, *self._labels), registry=self.registry)
        return made if labels else made.labels(**self._labels)


class MetricsServer:
    """Serves a registry on http://host:port/metrics until closed. Port 0: a free one. Raises ConfigError if taken."""

    def __init__(self, registry: CollectorRegistry, port: int, host: str = LOCALHOST) -> None:
        try:
            self._server: WSGIServer
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise ConfigError(
                f"--metrics-port {port} is taken"
                if taken
                else f"--metrics-port {port} cannot be opened at {host}: {error}",
                fix="choose another port" if taken else "choose an address of this machine with --metrics-host",
            ) from error
        self.port: int = self._server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
