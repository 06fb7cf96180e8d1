"""`run_peer`: one peer from its options to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from spes_p2p.config.schema import Config, steps_per_round_at
from spes_p2p.consensus.actions import Notice
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import Admission
from spes_p2p.consensus.messages import RENEWAL, Commit
from spes_p2p.data.feed import PieceDataset
from spes_p2p.data.loader import AnyDataset, LeasedLoader, LocalLoader, check_datasets, need_held_out, open_dataset
from spes_p2p.data.order import handed_out
from spes_p2p.data.trees import FolderPieces
from spes_p2p.errors import ConfigError, PermanentError, SpesError, Stopped
from spes_p2p.exchange.pieces import DataTraffic
from spes_p2p.files import make_folder, on_a_sound_disk
from spes_p2p.ids import NO_HASH, PeerId, short
from spes_p2p.observe.events import EventBus, LastError, Note, Pause, Peer, Round, Warning
from spes_p2p.observe.live import Facts
from spes_p2p.observe.prometheus import Metrics, MetricsServer
from spes_p2p.observe.sinks import file_sinks, unfailing
from spes_p2p.ownership.assign import columns_of
from spes_p2p.peer.checks import raise_failures
from spes_p2p.peer.connection import Connection
from spes_p2p.peer.data_feed import DATA, check_dataset
from spes_p2p.peer.departure import Departure, last_words
from spes_p2p.peer.devices import choose_cards, choose_device
from spes_p2p.peer.doctor import fitness_of
from spes_p2p.peer.entrance import check_kept_is_open, check_not_banned
from spes_p2p.peer.fitting import fit_config, measure_ranks, sizes_to_time
from spes_p2p.peer.folder import CHECKPOINTS, RUN, STATE, holds_run
from spes_p2p.peer.live import LiveFacts
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.pausing import PauseSwitch, PauseTriggers
from spes_p2p.peer.resume import Resumed, SavedLead, Saver, TrainingSetup
from spes_p2p.peer.stopping import leaving_on_signals
from spes_p2p.peer.training import LoopOptions, TrainingLoop
from spes_p2p.planning.budget import columns_that_fit
from spes_p2p.state.layout import Layout
from spes_p2p.swarm.hivemind_backend import NetworkThread
from spes_p2p.sync.dump import RoundDump
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.outer import outer_of
from spes_p2p.sync.surroundings import Applied
from spes_p2p.sync.trainer_bridge import TrainerBridge
from spes_p2p.train.ddp import Ranks
from spes_p2p.train.stages import Place, Restored
from spes_p2p.train.step import pinned
from spes_p2p.train.trainer import Trainer
from spes_p2p.train.worker import LocalRanks, ranks_from_environment, serve

Say = Callable[[str], None]


@dataclass(frozen=True)
class Running:
    """A peer that has joined: peer id, run id, folder, steps per round (a function of the step), and its live facts."""

    peer: PeerId
    run_id: str
    output: Path
    steps_per_round: Callable[[int], int]
    facts: Callable[[], Facts]


Show = Callable[[Running], None]
NEWS = ("vouched", "decay", "ending", "quorum")
"""Kinds of notices that are no warning: what the organiser has said, and that a run which waited goes on."""
LOST = (
    "what this machine trained since its last counted round is lost; the same command goes on from the last checkpoint"
)


@dataclass(frozen=True)
class Surroundings:
    """Who looks at a peer, and who may pause it: see `run_peer`."""

    bus: EventBus
    say: Say
    show: Show
    pause: PauseSwitch
    last_words: list[str] = field(default_factory=list)


def run_peer(options: PeerOptions, bus: EventBus, say: Say, show: Show, pause: PauseSwitch | None = None) -> str:
    """Joins a run, trains until SIGINT, SIGTERM or the last round, and leaves; what to say last, when all is closed.

    `say` gets lines for a person; `show` is called once when the peer is in, and may add sinks to `bus`. `pause` is
    obeyed, and set by the options' schedule and battery. Under an outer torchrun only rank 0 joins the network.
    """
    say = unfailing(say)
    device = choose_device(options.device)
    outer = ranks_from_environment(device)
    if outer is not None and outer.rank > 0:
        serve(outer)
        return ""
    make_folder(options.folder)
    check_kept_is_open(options.folder, options.fingerprint)
    if holds_run(options.folder):
        say(f"continuing the run that is kept in {options.folder}")
    traffic = DataTraffic()
    gate = TrainerBridge(lambda event: _note_commit(event, connection, bus), lambda notice: _note(notice, bus))
    around = Surroundings(bus, say, show, pause or PauseSwitch())
    watch = PauseTriggers(around.pause, options.schedule, options.pause_on_battery)
    with closing(watch), NetworkThread() as thread, leaving_on_signals(gate.stop, say, LOST):  # before CUDA is touched
        try:
            with (
                on_a_sound_disk(options.folder),
                closing(Connection.open(thread, options, gate, say, traffic)) as connection,
            ):
                _run_connected(connection, options, device, outer, around)
        except Stopped:
            say("stopped before training began")
        except SpesError as error:
            bus.emit(LastError.of(error))
            raise
    return "".join(around.last_words)


def _run_connected(
    connection: Connection, options: PeerOptions, device: torch.device, outer: Ranks | None, around: Surroundings
) -> None:
    config, info, bus, say = connection.config, connection.info, around.bus, around.say
    _add_file_sinks(options, config, info, connection.peer_id, bus)
    vitals = connection.presence.vitals
    vitals.set_device(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    bus.add(vitals)
    # what the machine cannot do is said before any data is fetched
    with _ranks(options, device, outer, config.optimizer.batch_sequences, connection.gate.failed, say) as ranks:
        dataset = _open_data(connection, options, bus, say)
        loader = _make_loader(config, info, dataset, connection.peer_id)
        with _metrics(options, info, connection.peer_id, bus, say):
            device = ranks.device if ranks.cards else device
            config, columns = _fit(options, config, device, ranks, say)
            # memory runs out here, before others count on us
            with closing(_make_trainer(options, config, connection.layout, device, ranks)) as trainer:
                if device.type == "cuda":
                    loader.put = pinned
                _train(connection, options, TrainingSetup(config, trainer, loader, dataset), columns, around)


def _fit(options: PeerOptions, agreed: Config, device: torch.device, ranks: Ranks, say: Say) -> tuple[Config, int]:
    """The config with what this machine has memory for, and for how many columns."""
    memory = measure_ranks(device, ranks)
    config, words = fit_config(agreed, options, memory)
    if words:
        say(words)
    raise_failures(fitness_of(agreed, config, words, options, memory), say)
    return config, columns_that_fit(config, memory)


def _make_trainer(options: PeerOptions, config: Config, layout: Layout, device: torch.device, ranks: Ranks) -> Trainer:
    trainer = Trainer(config, layout, device, ranks)
    trainer.sizes_to_time = sizes_to_time(config, options, device, ranks.world_size)
    return trainer


def _train(
    connection: Connection, options: PeerOptions, learning: TrainingSetup, columns: int, around: Surroundings
) -> None:
    """`columns`: how many this machine has memory for."""
    config, info, bus, say, pause = learning.config, connection.info, around.bus, around.say, around.pause
    checkpoints, me = options.folder / CHECKPOINTS, connection.peer_id
    store = options.folder / RUN / STATE
    resumed = Resumed.load(checkpoints, info, connection.layout, bus.emit, store) if holds_run(options.folder) else None
    pause.on_change(lambda why: _note_pause(why, connection, bus))
    connection.wishes.pause(pause.active)
    tip = connection.enter(columns)
    say(about_itself(me, tip.manifest))
    say(f"others join with this invitation:\n  {connection.found.contacts.word}")
    facts = LiveFacts(connection)
    around.show(Running(me, info.run_id, options.folder, lambda step: steps_per_round_at(config, step), facts))
    if pause.active:
        bus.emit(Pause(True, pause.why))
    saver = Saver(checkpoints, info, learning, connection.disk.chain.commit_of, bus.emit)
    dump = None
    if options.dump_rounds is not None:
        outer = outer_of(connection.driver.core.state.rules)
        dump = RoundDump(options.dump_rounds, connection.layout, me, config.sync.merge_top_k, outer)
    saved_lead = SavedLead(checkpoints, store, info, me, connection.layout, connection.disk, learning)
    loop_options = LoopOptions(dump, options.until_round, pause, saved_lead)
    loop = TrainingLoop(connection, learning, bus.emit, saver, loop_options)
    try:
        _begin(loop, resumed, tip, me, learning, saved_lead)
        del resumed  # it maps a checkpoint that may be removed while training goes on
        loop.run()
        Departure(loop).run()
        around.last_words.append(last_words(connection, options.folder, loop.machine.own.uncounted.tokens))
    finally:
        pause.close()


def about_itself(me: PeerId, tip: Manifest) -> str:
    """Who this peer is, and where it stands: the others may be rounds ahead, and have gone on without it."""
    said = f"this is peer {me}, with the state of round {tip.round}"
    is_member = me in {member.peer for member in tip.members}
    return said if is_member else f"{said}; it takes part as soon as a round has admitted it"


def _add_file_sinks(options: PeerOptions, config: Config, info: RunInfo, me: PeerId, bus: EventBus) -> None:
    for sink in file_sinks(
        options.folder,
        tensorboard=config.output.tensorboard,
        wandb=config.output.wandb,
        run_id=info.run_id,
        peer=me,
        settings=config.model_dump(),
    ):
        bus.add(sink)


@contextlib.contextmanager
def _metrics(options: PeerOptions, info: RunInfo, me: PeerId, bus: EventBus, say: Say) -> Iterator[None]:
    """For Prometheus, where it was asked for."""
    if options.metrics_port is None:
        yield
        return
    metrics = Metrics(info.run_id, me)
    with closing(MetricsServer(metrics.registry, options.metrics_port, options.metrics_host)) as server:
        bus.add(metrics)
        say(f"metrics: {server.url}")
        yield


@contextlib.contextmanager
def _ranks(
    options: PeerOptions,
    device: torch.device,
    outer: Ranks | None,
    batch_sequences: int,
    lost: Callable[[SpesError], None],
    say: Say,
) -> Iterator[Ranks]:
    """Those of an outer torchrun, else processes of our own; `lost` is told when one of these ends."""
    if outer is not None:
        yield outer
        return
    cards = choose_cards(options, device, batch_sequences, say)
    count = len(cards) or options.local_ranks or 1
    if batch_sequences % count:  # the trainer would say so too, but only when all ranks are up
        raise ConfigError(
            f"a batch of {batch_sequences} sequences cannot be split over {count} ranks",
            fix="use --local-ranks with a number that divides optimizer.batch_sequences",
        )
    with LocalRanks(count, device, lost, cards) as local:
        yield local.ranks


def _begin(
    loop: TrainingLoop,
    resumed: Resumed | None,
    tip: Commit,
    me: PeerId,
    learning: TrainingSetup,
    saved_lead: SavedLead,
) -> None:
    """Takes up the state of the tip, from where a checkpoint left it if there is one.

    What that is ahead counts, too, where the first round begins anew: also where it is of the very tip, but this peer
    has to be named again first.
    """
    restored = _restore(resumed, tip, me, learning)
    loop.begin(tip.manifest, restored, None if resumed is None else partial(saved_lead.of, resumed))


def _restore(resumed: Resumed | None, tip: Commit, me: PeerId, learning: TrainingSetup) -> Restored | None:
    """Puts saved training state back; None where it is not exactly that of the tip, and of what we own by it."""
    if resumed is None:
        return None
    trainer, loader = learning.trainer, learning.loader
    if not resumed.restore(trainer, loader) or resumed.manifest != tip.certificate.manifest:
        return None  # the moments are kept, the values are those of the newest commit
    if trainer.learner.owned != columns_of(tip.manifest.ownership, me):
        return None
    place = Place(loader.ranges, loader.consumed) if isinstance(loader, LeasedLoader) else Place()
    return Restored(place, resumed.uncounted, trainer.round_steps)


def _open_data(connection: Connection, options: PeerOptions, bus: EventBus, say: Say) -> AnyDataset:
    """The data on this machine, or what other peers give of the run's. Raises DataError for another dataset."""
    config, info = connection.config, connection.info
    dataset: AnyDataset
    is_own = config.data.source == "local" or info.dataset == NO_HASH
    if not is_own and not config.data.path:
        feed = connection.feed_from_others(lambda text: bus.emit(Warning(text)))
        check_datasets(feed.grid.catalogue, config)
        dataset = PieceDataset(feed)
    else:
        dataset = open_dataset(config)
        if not is_own:
            pieces = FolderPieces.open(dataset, options.folder / DATA, say)
            check_dataset(pieces.dataset_hash, config.data.path, info)
            check_datasets(pieces.catalogue, config)
            connection.data.serve(pieces)
    need_held_out(dataset, config, config.eval.sequences if config.eval.every_rounds else 0)
    return dataset


def _make_loader(config: Config, info: RunInfo, dataset: AnyDataset, me: PeerId) -> LeasedLoader | LocalLoader:
    """Leased blocks of the run's dataset, or the peer's own data."""
    if config.data.source == "local" or info.dataset == NO_HASH:
        return LocalLoader(dataset, config, me)
    return LeasedLoader(dataset, config)


def _note_commit(event: Applied, connection: Connection, bus: EventBus) -> None:
    manifest, traffic = event.commit.manifest, connection.data.traffic
    try:
        check_not_banned(connection.info, manifest, connection.peer_id)
    except PermanentError as error:
        connection.gate.failed(error)
    counted = 0 if event.counted is None else event.counted.tokens
    connection.presence.progress.counted_tokens += counted - event.own_tokens
    data_sent, data_received = traffic.take()
    bus.emit(
        Round(
            round=manifest.round,
            step=manifest.step,
            roster_size=len(manifest.roster),
            commit="renewal" if event.commit.certificate.kind == RENEWAL else "committed",
            tokens=sum(entry.tokens for entry in manifest.roster),
            own_tokens=sum(entry.tokens for entry in manifest.roster if entry.peer == connection.peer_id),
            own_share=(manifest.credit_of(connection.peer_id) or (-1.0,))[0],
            bytes_sent=max(0, event.bytes_sent - data_sent),
            bytes_received=event.bytes_received,
            seconds=event.seconds,
            model_hash=manifest.state_root.hex(),
            merge_alpha=manifest.merge.alpha if manifest.merge else 0.0,
            stale_columns=event.stale_columns if manifest.slices else (),
            deadline_seconds=round(event.deadline_seconds, 3),
            refused=tuple(event.refused),
            lost_tokens=event.lost_tokens,
            data_bytes_sent=data_sent,
            data_bytes_received=data_received + traffic.take_elsewhere(),
            handed_out=handed_out(connection.config.data, manifest.leases.cursor),
        )
    )
    me = connection.peer_id
    if event.caught_up:
        return  # who came and went meanwhile is no news any more
    before = {member.peer for member in event.previous.members}
    after = {member.peer for member in manifest.members}
    for peer in sorted(after - before):
        bus.emit(Peer("joined", peer, manifest.round, own=peer == me))
    excluded = Admission(manifest.roll)
    for peer in sorted(before - after):
        is_banned, has_left = excluded.is_banned(peer), peer in event.leavers
        change: Literal["banned", "left", "lost"] = "banned" if is_banned else "left" if has_left else "lost"
        bus.emit(Peer(change, peer, manifest.round, own=peer == me))


def _note_pause(why: str, connection: Connection, bus: EventBus) -> None:
    connection.wishes.pause(bool(why))
    bus.emit(Pause(bool(why), why))


def _note(notice: Notice, bus: EventBus) -> None:
    who = f"peer {short(notice.peer)}: " if notice.peer else ""
    bus.emit((Note if notice.kind in NEWS else Warning)(f"{who}{notice.text}"))
