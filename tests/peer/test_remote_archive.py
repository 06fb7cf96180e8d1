"""An archive at a URL: what is there, what a crash or a liar leaves of it, and a run that goes on from it alone."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem

from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.errors import ConfigError, NetworkError, PermanentError, RemoteProtocolError
from spes_p2p.ids import NO_HASH, PeerId, sha256
from spes_p2p.interop.hf import state_layout
from spes_p2p.peer.remote_archive import RemoteArchive, run_as_it_began
from spes_p2p.peer.remote_folder import RemoteFolder
from spes_p2p.state.initial import InitialState
from spes_p2p.state.store import StateStore
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import describe_run
from spes_p2p.sync.node import Run
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.sync.swarm_cases import check_agreement, commits, small_config, until
from tests.sync.test_archive import evening, is_archived, with_archive

CONFIG = small_config("swarm.heartbeat_seconds=0.2")
URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    """fsspec's memory is one for the process."""
    yield
    fsspec.filesystem("memory").store.clear()


async def free(size: int) -> None:
    """No limit on the link."""


def archive_of(swarm: MemorySwarm, folder: RemoteFolder, said: list[str]) -> RemoteArchive:
    node = swarm.node(swarm.network.peer("keeper"), said.append)
    return RemoteArchive(folder, swarm.run, node.checker.check, said.append, free, free)


class Keeping:
    """The archive of a swarm's organiser while the block runs, copied to a URL."""

    def __init__(self, swarm: MemorySwarm, url: str = URL) -> None:
        self.said: list[str] = []
        self.archive = archive_of(swarm, RemoteFolder(url), self.said)
        self._swarm = swarm

    async def __aenter__(self) -> Keeping:
        swarm = self._swarm
        work = self.archive.keep(
            lambda: swarm.seat.kept, swarm.organiser.chain, swarm._organiser_store, renewals_of(swarm.folder)
        )
        self._task = asyncio.create_task(work)
        return self

    async def __aexit__(self, *ended: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    def has(self, manifest: Manifest) -> bool:
        return f"the state of round {manifest.round} is at {URL}" in self.said


def renewals_of(folder: Path) -> Path:
    return folder / ORGANISER / "renewals"


async def restored(swarm: MemorySwarm, folder: Path, remote: RemoteFolder, said: list[str]) -> int | None:
    """The round of the state that a machine with an empty disk gets from there, whole; None for none."""
    archive = archive_of(swarm, remote, said)
    folder.mkdir(parents=True)
    chain = Chain(folder / "chain")
    with closing(StateStore(folder / "state", swarm.layout)) as store:
        store.create_initial(InitialState(swarm.layout, swarm.config.run.seed, swarm.config.model.init_std))
        await archive.restore_chain(chain, folder / "renewals", has_state=True)
        await archive.restore_state(store, chain)
        newest = store.latest()
        if newest is None or newest.round == 0:
            return None
        assert chain.newest is not None
        assert chain.newest.manifest.round == newest.round
        assert newest.root == chain.newest.manifest.state_root
        newest.verify()
        return newest.round


async def kept_evening(swarm: MemorySwarm) -> Manifest:
    """Three peers train, all that they have is at the URL, and then they are gone. The newest manifest."""
    await swarm.start("abc")
    async with Keeping(swarm) as keeping:
        await swarm.until_round(3)
        await until(lambda: is_archived(swarm) and keeping.has(commits(swarm)[-1].manifest))
        newest = commits(swarm)[-1].manifest
        for name in "abc":
            await swarm.peers[PeerId(name)].kill()
    return newest


def test_a_run_goes_on_from_the_url_alone_when_everybody_is_gone(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await kept_evening(swarm)
        await swarm.kill_organiser()
        shutil.rmtree(folder / ORGANISER)  # all but its key
        said: list[str] = []
        assert await restored(swarm, folder / ORGANISER, RemoteFolder(URL), said) == newest.round
        await swarm.start_organiser()
        await asyncio.gather(swarm.add("d"), swarm.add("e"))
        await swarm.until_round(newest.round + 3, ["d", "e"])
        chain = commits(swarm, "d")
        assert chain[newest.round].manifest == newest
        renewal = chain[newest.round + 1]
        assert renewal.certificate.by_organiser
        assert renewal.manifest.state_root == newest.state_root
        check_agreement(swarm)

    with_archive(folder, play, CONFIG)


@pytest.mark.parametrize("change", ["", "another", "damaged"])
def test_a_node_that_has_lost_its_disk_goes_on_with_a_run_that_an_earlier_version_began(
    folder: Path, change: str
) -> None:
    """That version did not know all keys that this one publishes."""

    async def play(swarm: MemorySwarm) -> None:
        info, node = swarm.info, folder / "node"
        tree = yaml.safe_load(info.config)
        del tree["data"]["eos_id"]
        older = replace(info, config=yaml.safe_dump(tree, sort_keys=False))
        swarm.run = replace(swarm.run, info=older)
        await kept_evening(swarm)
        if change == "damaged":
            RemoteFolder(URL).write("run.yaml", older.config.encode()[:-100])
        now = info
        if change == "another":
            now = describe_run(small_config("optimizer.lr=0.5"), info.dataset, info.organiser)
        found = await run_as_it_began(node, URL, now)
        assert found == (now if change else older)
        keeper, chain = swarm.node(swarm.network.peer("keeper"), lambda text: None), Chain(node / "chain")
        run = replace(swarm.run, info=found)
        archive = RemoteArchive(RemoteFolder(URL), run, keeper.checker.check, lambda text: None, free, free)
        with pytest.raises(PermanentError, match="is the archive of another run") if change else nullcontext():
            await archive.restore_chain(chain, node / "renewals", has_state=True)
        assert bool(chain.length) == (not change)

    with_archive(folder, play, CONFIG)


def test_an_archive_that_is_not_whole_or_not_needed_says_nothing_of_how_the_run_began(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        info, node, there = swarm.info, folder / "node", RemoteFolder(URL)
        tree = yaml.safe_load(info.config)
        del tree["data"]["eos_id"]
        older = replace(info, config=yaml.safe_dump(tree, sort_keys=False))
        swarm.run = replace(swarm.run, info=older)
        assert await run_as_it_began(node, URL, info) == info  # nothing is there yet
        await kept_evening(swarm)
        assert await run_as_it_began(node, URL, info) == older
        del tree["data"]["tokenizer"]
        less = replace(info, config=yaml.safe_dump(tree, sort_keys=False))
        assert await run_as_it_began(node, URL, less) == less  # it says more than ours
        assert await run_as_it_began(node, str(folder / "archive"), info) == info
        begun = folder / "begun"
        (begun / "run/chain").mkdir(parents=True)
        (begun / "run/chain/0.commit").touch()
        assert await run_as_it_began(begun, URL, info) == info
        newest = there.read("newest")
        assert newest is not None
        there.write("newest", b"?")
        assert await run_as_it_began(node, URL, info) == info
        there.write("newest", newest)
        there.remove(f"states/{newest.decode()}")
        assert await run_as_it_began(node, URL, info) == info
        there.remove("newest")
        assert await run_as_it_began(node, URL, info) == info

    with_archive(folder, play, CONFIG)


def test_what_is_there_is_the_newest_state_and_nothing_of_older_ones(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await kept_evening(swarm)
        names = RemoteFolder(URL).sizes()
        store = swarm._organiser_store
        tiles = {f"tiles/{name.hex()}" for name in store.version(newest.round).tile_hashes}
        assert {name for name in names if name.startswith("tiles/")} == tiles
        assert [name for name in names if name.startswith("states/")] == [f"states/{manifest_hash(newest).hex()}"]
        assert len([name for name in names if name.startswith("commits/")]) == newest.round + 1

    with_archive(folder, play, CONFIG)


def test_storage_that_does_not_answer_keeps_no_thread_from_the_run(tmp_path: Path) -> None:
    asked, over = threading.Event(), threading.Event()

    class Silent(RemoteFolder):
        def read(self, name: str) -> bytes | None:
            asked.set()
            over.wait()
            return None

    async def scenario() -> None:
        run = Run(describe_run(CONFIG, NO_HASH, PeerId("organiser")), CONFIG, state_layout(CONFIG))
        archive = RemoteArchive(Silent(URL), run, lambda *signed: True, lambda text: None, free, free)
        names = [sha256(bytes([number])) for number in range(64)]
        reading = asyncio.gather(*(archive._commit(name) for name in names), return_exceptions=True)
        await asyncio.to_thread(asked.wait)
        try:
            async with asyncio.timeout(30.0):
                await asyncio.to_thread(lambda: None)
        finally:
            over.set()
            await reading

    asyncio.run(scenario())


class Broken(RemoteFolder):
    """Fails for good after so many changes, as if its node died there."""

    def __init__(self, url: str, changes: int) -> None:
        super().__init__(url)
        self.left = changes

    def write(self, name: str, data: bytes) -> None:
        self._die()
        super().write(name, data)

    def remove(self, name: str) -> None:
        self._die()
        super().remove(name)

    def _die(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise NetworkError("it died here")


def test_a_crash_at_any_change_leaves_a_whole_state_and_the_next_node_goes_on(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await evening(swarm, 2)
        chain, store = swarm.organiser.chain, swarm._organiser_store
        first, second = store.version(store.rounds()[-2]), store.version(store.rounds()[-1])
        assert first.round > 0

        def put(remote: RemoteFolder) -> RemoteArchive:
            return archive_of(swarm, remote, [])

        async def put_version(archive: RemoteArchive, round: int) -> None:
            await archive._look(chain)
            await archive._put(chain.commit(round).manifest, chain, store.version(round))

        changes = 0
        while True:
            fsspec.filesystem("memory").store.clear()
            await put_version(put(RemoteFolder(URL)), first.round)
            broken = Broken(URL, changes)
            died = False
            try:
                await put_version(put(broken), second.round)
            except NetworkError:
                died = True
            found = await restored(swarm, folder / f"after-{changes}", RemoteFolder(URL), [])
            assert found in ((first.round, second.round) if died else (second.round,))
            again = Broken(URL, 10_000)
            await put_version(put(again), second.round)
            assert await restored(swarm, folder / f"again-{changes}", RemoteFolder(URL), []) == second.round
            if not died:
                break
            changes += 1
        assert changes > 20

    with_archive(folder, play, CONFIG)


def test_what_storage_lost_of_a_file_is_named_and_written_again_when_the_node_starts(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = (await evening(swarm, 2)).manifest
        chain, store = swarm.organiser.chain, swarm._organiser_store
        bucket, renewals = folder / "bucket", folder / "renewals"
        renewals.mkdir()
        (renewals / "ab").write_bytes(b"signed")
        (renewals / "cd.partial").write_bytes(b"sig")

        async def start(said: list[str]) -> None:
            archive = archive_of(swarm, RemoteFolder(f"file://{bucket}"), said)
            await archive.restore_chain(chain, renewals, has_state=True)
            await archive._look(chain)
            await archive._put(newest, chain, store.version(newest.round))
            await archive._put_renewals(renewals)

        await start([])
        head = manifest_hash(newest).hex()
        assert (bucket / "newest").read_text() == head
        genesis = manifest_hash(chain.commit(0).manifest).hex()
        whole = {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file()}
        assert not [path for path in whole if path.suffix == ".partial"]
        tile = next(path for path in whole if path.parent.name == "tiles")
        damaged = ("newest", f"commits/{head}", f"commits/{genesis}", f"states/{head}", "run.yaml", "renewals/ab")
        for at, name in enumerate((*damaged, f"tiles/{tile.name}")):
            for size in (0, len(whole[bucket / name]) - 1):
                (bucket / name).write_bytes(whole[bucket / name][:size])
                if name == "newest" or name.startswith("commits/"):
                    with pytest.raises(RemoteProtocolError, match=f"{name}.* is damaged") as caught:
                        await restored(swarm, folder / f"cut-{at}-{size}", RemoteFolder(f"file://{bucket}"), [])
                    assert "start the node that kept it once more" in caught.value.fix
                for folder_of in ("commits", "renewals"):
                    (bucket / folder_of / "ef.partial").touch()
                said: list[str] = []
                await start(said)
                assert said[-1] == f"the state of round {newest.round} is at file://{bucket}"
                assert {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file()} == whole
        assert await restored(swarm, folder / "sound", RemoteFolder(f"file://{bucket}"), []) == newest.round
        assert {path.name for path in (folder / "renewals").iterdir()} == {"ab", "cd.partial"}

    with_archive(folder, play, CONFIG)


def test_what_is_there_is_compared_once_and_then_only_with_a_new_state(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await evening(swarm, 2)
        chain, store = swarm.organiser.chain, swarm._organiser_store
        older, newer = (chain.commit(round).manifest for round in store.rounds()[-2:])
        first = archive_of(swarm, RemoteFolder(URL), [])
        await first._look(chain)
        await first._put(newer, chain, store.version(newer.round))
        name = f"commits/{manifest_hash(older).hex()}"
        remote = Broken(URL, 1)
        second = archive_of(swarm, remote, [])
        await second._look(chain)
        for found in (older, older, newer):  # what is there is newer than what this node has at first
            RemoteFolder(URL).write(name, b"")
            await second._put(found, chain, store.version(found.round))
            assert remote.left == 0

    with_archive(folder, play, CONFIG)


def test_an_archive_that_may_be_of_another_run_or_newer_is_not_written_again(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await evening(swarm, 1)
        chain, remote, said = swarm.organiser.chain, RemoteFolder(URL), list[str]()
        remote.write("newest", b"")
        remote.write("commits/00", b"genesis of another run")
        genesis = manifest_hash(chain.commit(0).manifest).hex()
        for names in ([], [f"commits/{genesis}", "states/00"]):
            for name in names:
                remote.write(name, b"")
            archive = archive_of(swarm, remote, said)
            await archive.restore_chain(chain, folder / "renewals", has_state=True)
            assert said.pop() == "the archive cannot be read yet: the archive's file newest is damaged: b''"
            with pytest.raises(RemoteProtocolError, match="newest is damaged"):
                await archive._look(chain)
        remote.remove("states/00")
        await archive._look(chain)
        assert said == ["the archive's file newest is damaged: b''; this node writes it again"]

    with_archive(folder, play, CONFIG)


def test_a_file_that_is_being_written_to_a_disk_does_not_have_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def power_cut(descriptor: int) -> None:
        raise OSError("the power is cut")

    remote = RemoteFolder(f"file://{tmp_path}/bucket")
    remote.write("states/newest", b"the one before")
    monkeypatch.setattr("os.fsync", power_cut)
    with pytest.raises(NetworkError, match="the power is cut"):
        remote.write("states/newest", b"the next")
    assert remote.read("states/newest") == b"the one before"


class Sftp(MemoryFileSystem):
    """Keeps what came of a file when the connection is cut."""

    protocol = "sftp", "ssh"
    cachable = False
    is_cut = replaces = is_asked = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        assert not self.is_asked, "of two threads that wait for an answer, one never gets it"
        self.is_asked = True
        time.sleep(0)  # another thread's turn
        self.is_asked = False
        super().pipe_file(path, value[: len(value) // 2] if self.is_cut else value, mode, **options)
        if self.is_cut:
            raise OSError("the connection is cut")

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if self.exists(path2) and not self.replaces:
            raise OSError("the name is taken")
        super().mv(path1, path2, **options)


@pytest.mark.parametrize("replaces", [True, False])
def test_a_file_that_is_being_sent_to_a_server_does_not_have_its_name(
    replaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Sftp()
    server.replaces = replaces
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **options: (server, "/bucket/run"))
    remote = RemoteFolder("sftp://example.org/bucket/run")
    for data in (b"the one before", b"the one after that"):
        remote.write("newest", data)
        assert remote.read("newest") == data
        remote.forget()
        assert list(remote.sizes()) == ["newest"]
    server.is_cut = True
    with pytest.raises(NetworkError, match="the connection is cut"):
        remote.write("newest", b"the next")
    assert remote.read("newest") == b"the one after that"


def test_a_server_that_takes_no_options_is_opened_and_one_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(refusal: Exception | None, url: str, **options: Any) -> tuple[MemoryFileSystem, str]:
        if options:
            raise TypeError(f"connect() got an unexpected keyword argument {options}")
        if refusal is not None:
            raise refusal
        return Sftp(), "/run"

    monkeypatch.setattr("fsspec.core.url_to_fs", partial(opened, None))
    remote = RemoteFolder("sftp://me@example.org/run")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: remote.write(f"tiles/{number}", b"abc"), range(16)))
    assert len(remote.sizes()) == 16
    monkeypatch.setattr("fsspec.core.url_to_fs", partial(opened, TimeoutError("timed out")))
    with pytest.raises(NetworkError, match=r"sftp://me@example\.org/run refused: timed out"):
        RemoteFolder("sftp://me@example.org/run")


def test_what_a_server_calls_missing_by_its_number_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Smb(OSError):
        """As that of smbprotocol."""

    def missing(path: str) -> bytes:
        raise Smb(errno.ENOENT, "no such file")

    remote = RemoteFolder(URL)
    monkeypatch.setattr(remote._files, "cat_file", missing)
    assert remote.read("newest") is None


class Losing(RemoteFolder):
    """Somebody else removes a tile as soon as it is there."""

    def write(self, name: str, data: bytes) -> None:
        super().write(name, data)
        if name.startswith("tiles/") and self.left:
            self.left = False
            RemoteFolder(self.url).remove(name)

    left = True


def test_what_an_upload_left_is_not_sent_again(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = (await evening(swarm, 1)).manifest
        chain, store = swarm.organiser.chain, swarm._organiser_store
        sent: list[int] = []
        for changes in (6, 10_000):
            remote = Broken(URL, changes)
            archive = archive_of(swarm, remote, [])
            await archive._look(chain)
            with suppress(NetworkError):
                await archive._put(newest, chain, store.version(newest.round))
            sent.append(changes - max(0, remote.left))
        whole = len(set(store.version(newest.round).tile_hashes)) + newest.round + 1 + 3
        assert sent == [6, whole - 6]

    with_archive(folder, play, CONFIG)


def test_values_and_certificates_that_were_changed_there_are_not_taken(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await kept_evening(swarm)
        remote = RemoteFolder(URL)
        tile = next(name for name in remote.sizes() if name.startswith("tiles/"))
        sound = remote.read(tile)
        assert sound is not None
        said: list[str] = []
        for at, bad in enumerate((bytes([sound[0] ^ 1]) + sound[1:], sound[:-4], None)):
            remote.remove(tile)
            if bad is not None:
                remote.write(tile, bad)
            assert await restored(swarm, folder / f"tile-{at}", remote, said) is None
            assert f"the archive at {URL} is damaged: {tile}" in said[-1]
        remote.write(tile, sound)
        genesis, last = (
            f"commits/{manifest_hash(swarm.organiser.chain.commit(round).manifest).hex()}"
            for round in (0, newest.round)
        )
        kept = remote.read(last)
        remote.write(last, remote.read(genesis) or b"")
        with pytest.raises(RemoteProtocolError):
            await restored(swarm, folder / "commit", remote, said)
        remote.write(last, kept or b"")
        assert await restored(swarm, folder / "sound", remote, said) == newest.round

    with_archive(folder, play, CONFIG)


@pytest.mark.parametrize("bad", [None, b"damaged"])
def test_a_certificate_that_is_lost_there_ends_no_node_that_has_a_chain(folder: Path, bad: bytes | None) -> None:
    """The others have it; who has none is told which it is, and what brings it back."""

    async def play(swarm: MemorySwarm) -> None:
        newest = await kept_evening(swarm)
        remote, ours, said = RemoteFolder(URL), swarm.organiser.chain, list[str]()
        name = f"commits/{manifest_hash(ours.commit(newest.round - 1).manifest).hex()}"
        remote.remove(name)
        if bad is not None:
            remote.write(name, bad)
        with pytest.raises(RemoteProtocolError, match=name) as caught:
            await restored(swarm, folder / "empty", remote, said)
        assert "start the node that kept it once more" in caught.value.fix
        begun = Chain(folder / "begun")
        begun.append(ours.commit(0))  # an attempt before broke off: as good as none
        with pytest.raises(RemoteProtocolError, match=name):
            await archive_of(swarm, remote, said).restore_chain(begun, folder / "renewals", has_state=False)
        older = Chain(folder / "older")
        older.append(ours.commit(0))
        await archive_of(swarm, remote, said).restore_chain(older, folder / "renewals", has_state=True)
        assert name in said[-1]
        assert older.length == 1

    with_archive(folder, play, CONFIG)


def test_another_run_does_not_write_there(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await kept_evening(swarm)
        other = small_config("run.run_id=another")
        run = Run(describe_run(other, swarm.info.dataset, swarm.info.organiser), other, state_layout(other))
        node = swarm.node(swarm.network.peer("other"), lambda text: None)
        archive = RemoteArchive(RemoteFolder(URL), run, node.checker.check, lambda text: None, free, free)
        with pytest.raises(PermanentError, match="is the archive of another run"):
            await archive.restore_chain(Chain(folder / "other"), folder / "renewals", has_state=True)

    with_archive(folder, play, CONFIG)


def test_two_nodes_that_write_to_one_url_find_out_before_anything_is_lost(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await evening(swarm, 2)
        chain, store = swarm.organiser.chain, swarm._organiser_store
        one, other = (archive_of(swarm, RemoteFolder(URL), []) for _ in range(2))
        await one._look(chain)
        await other._look(chain)
        older, newer = (chain.commit(round).manifest for round in store.rounds()[-2:])
        await one._put(older, chain, store.version(older.round))
        with pytest.raises(PermanentError, match="another node writes to"):
            await other._put(newer, chain, store.version(newer.round))
        third = archive_of(swarm, Losing(f"{URL}-of-another"), [])
        await third._look(chain)
        with pytest.raises(PermanentError, match="somebody has removed 1 files"):
            await third._put(newer, chain, store.version(newer.round))
        assert await restored(swarm, folder / "found", RemoteFolder(URL), []) == older.round

    with_archive(folder, play, CONFIG)


def test_without_a_chain_of_its_own_a_node_never_begins_while_the_url_is_silent(folder: Path) -> None:
    class Silent(RemoteFolder):
        def read(self, name: str) -> bytes | None:
            raise NetworkError("no answer")

    async def play(swarm: MemorySwarm) -> None:
        archive, said = archive_of(swarm, Silent(URL), []), list[str]()
        with pytest.raises(NetworkError, match="no answer"):
            await archive.restore_chain(Chain(folder / "empty"), folder / "renewals", has_state=True)
        await evening(swarm)
        begun = archive_of(swarm, Silent(URL), said)
        await begun.restore_chain(swarm.organiser.chain, folder / "renewals", has_state=True)
        assert "cannot be read yet" in said[0]

    with_archive(folder, play, CONFIG)


def test_it_lies_in_a_folder_as_well(folder: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        newest = await kept_evening(swarm)
        bucket, there = RemoteFolder(URL), RemoteFolder(f"file://{folder / 'bucket'}")
        assert there.sizes() == {}
        for name in bucket.sizes():
            there.write(name, bucket.read(name) or b"")
        assert there.sizes() == bucket.sizes()
        assert await restored(swarm, folder / "from-file", there, []) == newest.round
        for name in bucket.sizes():
            there.remove(name)
            there.remove(name)
        assert there.sizes() == {}

    with_archive(folder, play, CONFIG)


def test_a_url_that_nothing_here_opens_is_refused() -> None:
    with pytest.raises(ConfigError, match="--archive nonsense://bucket cannot be opened"):
        RemoteFolder("nonsense://bucket")
    with pytest.raises(ConfigError, match=r"--archive https://example\.org/run cannot be kept: over http") as caught:
        RemoteFolder("https://example.org/run")
    assert "s3://" in caught.value.fix
