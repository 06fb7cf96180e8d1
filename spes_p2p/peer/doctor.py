"""`run_checks`: runs all `checks` of this machine and of its connection to a run, before anything is downloaded.

Takes no part in the run: it uses a throw-away identity and fetches nothing but the run's config and what its data is.
What is measured of this machine (Python, torch, driver, GPUs, memory, disk) takes less than a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from spes_p2p.config.load import changed
from spes_p2p.config.schema import Config
from spes_p2p.data.pieces import PieceGrid
from spes_p2p.data.web_url import WebAccess, WebFolder, needs_consent
from spes_p2p.errors import (
    ClockSkewed,
    ConfigError,
    IdentityInUse,
    NetworkError,
    PermanentError,
    RemoteProtocolError,
    SpesError,
    first_line,
)
from spes_p2p.exchange.piece_fetcher import fetch_catalogue
from spes_p2p.files import make_folder
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.observe.metrics import amount_text
from spes_p2p.peer.checks import (
    Check,
    Disk,
    Gpu,
    Machine,
    clock_check,
    disk_check,
    fit_check,
    machine_checks,
    of_error,
    reach_check,
    sync_check,
)
from spes_p2p.peer.devices import choose_cards, limits_of, why_it_cannot_train
from spes_p2p.peer.entrance import check_open, organiser_words
from spes_p2p.peer.fitting import fit_config, measure, wanted_columns
from spes_p2p.peer.herald import OWN_DATA
from spes_p2p.peer.network import open_network
from spes_p2p.peer.options import JoinTarget, PeerOptions
from spes_p2p.peer.web_data import absent_on_web
from spes_p2p.planning.budget import Device
from spes_p2p.swarm.hivemind_backend import HivemindNetwork, NetworkThread, Reach
from spes_p2p.swarm.hivemind_backend.identity import IdentityFile, signer_of
from spes_p2p.sync.announced import read_peers
from spes_p2p.sync.finding import find_run, load_run
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.sealing import EnvelopeChecker
from spes_p2p.sync.web_sources import SourceKeeper
from spes_p2p.train.memory import free_and_total_bytes

Tell = Callable[[Check], None]
NETWORK_SECONDS = 22.0
"""Time limit of all checks that need other nodes; with the local checks, the doctor takes less than 30 s."""
ANSWER_SECONDS = 5.0
MOST_ASKED = 2


@dataclass
class _Found:
    """What the network told."""

    config: Config | None = None
    peers: int = 0
    """In the run, this one not counted."""
    grid: PieceGrid | None = None
    """Of the run's data; None where nobody said."""

    @property
    def data_bytes(self) -> int | None:
        return None if self.grid is None else self.grid.tokens * self.grid.item_bytes


def run_checks(
    options: PeerOptions, meeting: JoinTarget, device: torch.device, tell: Tell, makes_key: bool = False
) -> list[Check]:
    """All checks, each told as soon as it is known. Without an address, those of the machine alone.

    `makes_key`: the peer's key is made in its folder, and its id told, in every run.
    """
    checks: list[Check] = []

    def note(check: Check) -> None:
        checks.append(check)
        tell(check)

    for check in machine_checks(find_machine(), on_gpu=device.type == "cuda"):
        note(check)
    if not meeting.addresses:
        if makes_key:
            note(_id_check(options.folder, False))
        note(disk_check(None, 0, find_disk(options.folder)))
        note(Check("run", "warning", "not checked: no invitation was given", "run spes-p2p doctor spes1..."))
        return checks
    found = _ask_others(options, meeting, note)
    if found.config is not None:
        for check in fit_checks(found.config, options, device, found.data_bytes):
            note(check)
        if found.peers:
            note(sync_check(found.config, wanted_columns(found.config, options), found.peers + 1))
    is_vouched = found.config is not None and found.config.swarm.trusted == "vouched"
    if is_vouched or makes_key:
        note(_id_check(options.folder, is_vouched))
    return checks


def _id_check(output: Path, is_vouched: bool) -> Check:
    """Who this peer will be, for its organiser to know; its key is made now. `is_vouched`: a vote is given by name."""
    path = output / "identity.key"
    try:
        if not os.path.exists(path):  # Path.exists raises where we may not look, or the name is too long
            make_folder(output)
            IdentityFile(path).release()
        me = signer_of(path).peer_id
    except (ConfigError, IdentityInUse) as error:
        return of_error("votes" if is_vouched else "peer", error)
    if is_vouched:
        return Check("votes", "ok", f"trains without a vote; an invitation with one: spes-p2p invite --for {me}")
    return Check("peer", "ok", f"this peer will be {me}")


def fit_checks(
    config: Config, options: PeerOptions, device: torch.device, data_bytes: int | None = None
) -> list[Check]:
    """Whether this machine fits the run: what `join` checks, too. `data_bytes`: of its data, where that is known."""
    try:
        cards = choose_cards(options, device, config.optimizer.batch_sequences, lambda text: None)
    except ConfigError as error:
        return [of_error("fit", error)]
    memory = measure(device, len(cards) or options.local_ranks or 1, cards)
    fitted, words = fit_config(config, options, memory)
    return fitness_of(config, fitted, words, options, memory, data_bytes)


def fitness_of(
    config: Config, fitted: Config, words: str, options: PeerOptions, memory: Device, data_bytes: int | None = None
) -> list[Check]:
    """The same where it was measured and fitted already."""
    fits = not words or fitted != config
    fetched = options.max_data_disk if options.data is None and config.data.source == "leased" else 0
    fetched = fetched if data_bytes is None else min(fetched, data_bytes)
    count = wanted_columns(config, options)
    return [
        fit_check(fitted, memory, count, words, fits),
        disk_check(fitted, count, find_disk(options.folder), fetched),
    ]


def _ask_others(options: PeerOptions, meeting: JoinTarget, note: Tell) -> _Found:
    with NetworkThread() as thread, TemporaryDirectory(prefix="spes-p2p-doctor-") as folder:
        return thread.run(_within(options, meeting, Path(folder), note))


async def _within(options: PeerOptions, meeting: JoinTarget, folder: Path, note: Tell) -> _Found:
    found = _Found()
    try:
        async with asyncio.timeout(NETWORK_SECONDS):
            await _ask(options, meeting, folder, note, found)
    except TimeoutError:
        fix = "try again; another initial peer may answer sooner"
        note(Check("network", "failure", f"the checks did not finish within {NETWORK_SECONDS:g} s", fix))
    except ClockSkewed as error:
        note(of_error("clock", error))
    except SpesError as error:
        note(of_error("network", error))
    return found


async def _ask(options: PeerOptions, meeting: JoinTarget, folder: Path, note: Tell, found: _Found) -> None:
    own = replace(options.network, initial_peers=meeting.addresses, identity_path=folder / "identity.key")
    network = await open_network(own, folder / "identity.key")
    try:
        note(Check("network", "ok", f"{len(network.reached)} of {len(meeting.addresses)} initial peers answer"))
        note(clock_check(statistics.median(one.met.ahead_seconds for one in network.reached)))
        note(_port_check(network))
        note(reach_check({Reach.PUBLIC: True, Reach.PRIVATE: False}.get(network.reach), network.dialled_at))
        group = await find_run(network.directory, meeting.run_id, ANSWER_SECONDS, meeting.fingerprint)
        info, found.config = await load_run(network.transport, group, ANSWER_SECONDS)
        records = await read_peers(network, group.run_id, ANSWER_SECONDS)
        found.peers = sum(record.role == "peer" for record in records.values())
        words = await organiser_words(network, info, ANSWER_SECONDS)
        try:
            check_open(words, info, group.round, _id_of(options.folder) or network.signer.peer_id)
            note(Check("run", "ok", f"{group.run_id}, round {group.round}, {amount_text(found.peers, 'peer')}"))
        except PermanentError as error:
            note(of_error("run", error))
        if info.dataset == NO_HASH:
            found.config = changed(found.config, ("data.source=local",))
            note(Check("data", "ok", OWN_DATA))
        else:
            holders = [info.organiser, *(peer for peer in records if peer != info.organiser)][:MOST_ASKED]
            await _look_at_data(network, info, holders, found, note)
            if found.grid is not None:
                await _look_at_web(network, info, found.grid, holders, folder, options.web_data, note)
    finally:
        await network.close()


def _id_of(output: Path) -> PeerId | None:
    """Who the peer of this folder is; None where it has no key, or none that can be read, which `join` will say."""
    with contextlib.suppress(ConfigError):
        return signer_of(output / "identity.key").peer_id
    return None


def _port_check(network: HivemindNetwork) -> Check:
    listening = (address for address in network.transport.addresses if "/tcp/" in address)
    ports = sorted({address.split("/tcp/")[1].split("/")[0] for address in listening})
    if not ports:
        return Check("port", "ok", "not listening (client mode)")
    return Check("port", "ok", f"TCP {', '.join(ports)} is free to listen on")


async def _look_at_data(
    network: HivemindNetwork, info: RunInfo, holders: Sequence[PeerId], found: _Found, note: Tell
) -> None:
    try:
        catalogue = await fetch_catalogue(network.transport, info.dataset, holders, ANSWER_SECONDS, lambda *_: None)
        found.grid = PieceGrid(catalogue)
    except (NetworkError, RemoteProtocolError) as error:
        note(Check("data", "warning", f"could not be looked at: {error}", "try again in a minute"))


async def _look_at_web(
    network: HivemindNetwork,
    info: RunInfo,
    grid: PieceGrid,
    holders: Sequence[PeerId],
    folder: Path,
    access: WebAccess,
    note: Tell,
) -> None:
    """Whether each of the web servers that the organiser names gives data; where it names any."""
    keeper = SourceKeeper(info, EnvelopeChecker(network.verifier).check, folder)
    for holder in holders:
        with contextlib.suppress(NetworkError, RemoteProtocolError):  # it knows of none
            await keeper.look(network.transport, holder, ANSWER_SECONDS)
    if keeper.urls:
        note(await web_check(keeper.urls, access, grid))


async def web_check(urls: Sequence[str], access: WebAccess, grid: PieceGrid) -> Check:
    """Asks each for one piece of the run's data, which must be the right one."""
    answers = await asyncio.gather(*(_why_not(url, access, grid) for url in urls))
    absent = [f"{url}: {why}" for url, why in zip(urls, answers, strict=True) if why]
    text = f"{len(urls) - len(absent)} of {len(urls)} web servers have the run's data"
    if not absent:
        return Check("web", "ok", text)
    fix = "see with spes-p2p status whether other peers have copies of the data; if not, tell the organiser"
    return Check("web", "warning", f"{text}; {'; '.join(absent)}", fix)


async def _why_not(url: str, access: WebAccess, grid: PieceGrid) -> str:
    """Why `url` cannot provide the run's data; "" if it can."""
    if access is not WebAccess.ANY and needs_consent(url):
        return "not on the public web; used only with join --web-data any"
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return (await absent_on_web([WebFolder(url)], access, grid)).get(url, "")
    except TimeoutError:
        return f"no answer in {ANSWER_SECONDS:g} s"


NVIDIA_SMI = "nvidia-smi"
_SMI_SECONDS = 5.0


def find_machine() -> Machine:
    """Describes this machine. A GPU that cannot train, or not be queried, is listed with the reason in `trouble`."""
    free, total = free_and_total_bytes(torch.device("cpu"))
    return Machine(
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        python=sys.version_info[:3],
        torch=f"torch {torch.__version__.partition('+')[0]}",
        cuda=torch.version.cuda,
        rocm=None if torch.version.hip is None else f"for ROCm {torch.version.hip}",
        driver=_driver(),
        gpus=tuple(_gpus()),
        host_free_bytes=free,
        host_total_bytes=total,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def find_disk(output: Path) -> Disk:
    """Where `output` is, or would be made."""
    folder = output.absolute()
    while not os.path.exists(folder):  # Path.exists raises where we may not look, or the name is too long
        folder = folder.parent
    is_ours = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    held = _held_bytes(folder) if os.path.isdir(output) else 0
    return Disk(str(folder), shutil.disk_usage(folder).free, held, is_ours)


def _held_bytes(folder: Path) -> int:
    """Of all files under it, those with several names counted once."""
    found: dict[int, int] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a running peer may have removed it
            stat = path.lstat()
            found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        trouble = why_it_cannot_train(number)
        try:
            name, free_and_total = torch.cuda.get_device_name(number), torch.cuda.mem_get_info(number)
            found.append(Gpu(name, *free_and_total, trouble, limits_of(number)))
        except RuntimeError as error:
            found.append(Gpu("a GPU", 0, 0, trouble or first_line(error)))
    return found


def _driver() -> str:
    """The NVIDIA driver's version as nvidia-smi reports it; "" if there is none."""
    command = [NVIDIA_SMI, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    version = done.stdout.strip().splitlines()[:1]
    return f"NVIDIA driver {version[0]}" if done.returncode == 0 and version else ""
