"""The archive of a run on somebody else's storage: S3 and the like, at any URL that fsspec opens.

    run.yaml          the run's config, for `bootstrap --config`
    commits/HASH      every commit from genesis on, by the hash of its manifest
    tiles/HASH        values of the state
    states/HASH       for a manifest: the hashes of all manifests up to it, then those of the tiles of its state
    newest            the manifest whose state is whole here
    renewals/HASH     what the organiser signed where nobody was left (see `sync/organising/renewer`)

Nothing is ever changed but `newest`, which is written when all that it stands for is there; only then goes what no
longer belongs to it. So a broken upload goes on where it was, and at every moment one whole state is there. Storage may
still lose part of a file when the power goes: what has another size than ours is written again, at the latest when the
node starts. Nothing is believed on the way back: commits are checked from genesis on, tiles by their hashes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spes_p2p.config.load import extends
from spes_p2p.consensus.certificate import CheckSignature
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import NetworkError, PermanentError, RemoteProtocolError, StateError
from spes_p2p.files import PARTIAL, write_whole
from spes_p2p.ids import HASH_BYTES, Hash
from spes_p2p.observe.metrics import bytes_text
from spes_p2p.peer.folder import as_it_began, holds_run
from spes_p2p.peer.remote_folder import RemoteFolder
from spes_p2p.state.hashes import hash_tile, split_hashes
from spes_p2p.state.layout import VALUE_BYTES
from spes_p2p.state.staging import Staging
from spes_p2p.state.store import StateStore
from spes_p2p.state.version import Version
from spes_p2p.sync.chain import Chain, check_links
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.node import Run
from spes_p2p.sync.organising.renewer import RENEWALS
from spes_p2p.wire import pack, unpack

T = TypeVar("T")
Say = Callable[[str], None]
Pace = Callable[[int], Awaitable[None]]
LOOK_SECONDS = 5.0
RETRY_SECONDS = 60.0
AT_ONCE = 8
"""Requests that are under way together: most of each is spent waiting."""
POINTER = "newest"
CONFIG = "run.yaml"
MEND_FIX = "start the node that kept it once more, with its own folder: it writes the file again; or put a copy there"


@dataclass(frozen=True)
class _Kept:
    """A state that is whole there. `line`: the manifests from genesis up to its own; `tiles`: by tile id."""

    line: tuple[Hash, ...]
    tiles: tuple[Hash, ...]

    @property
    def head(self) -> Hash:
        return self.line[-1]

    @property
    def round(self) -> int:
        return len(self.line) - 1


class _Threads:
    """Apart from the few of the loop, which the run's own work needs: storage may take minutes to answer."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE, "archive")

    async def __call__(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *arguments))


class RemoteArchive:
    """What one node keeps at a URL: `restore_chain` and `restore_state` at its start, then `keep`."""

    def __init__(
        self, folder: RemoteFolder, run: Run, check: CheckSignature, say: Say, upload: Pace, download: Pace
    ) -> None:
        """`upload` and `download` wait until so many bytes may be moved."""
        self._folder, self._run, self._check, self._say = folder, run, check, say
        self._upload, self._download = upload, download
        self._in_thread = _Threads()
        self._pointer: bytes | None = None
        """What `newest` says, as far as this node knows."""
        self._kept: _Kept | None = None
        self._line: list[Hash] = []
        """The manifests of our chain, as far as they were looked at."""
        self._has_looked = self._has_compared = False
        self._said = ""

    # ---------------------------------------------------------------- back

    async def restore_chain(self, chain: Chain, renewals: Path, has_state: bool) -> None:
        """Takes over the commits that are only there, and what was signed where nobody was left.

        `has_state`: whether this node has any. Without what is there a node with a chain and a state goes on; another
        one would begin the run a second time, also where an attempt before has brought the first commits, and raises
        NetworkError, or RemoteProtocolError for what is missing, damaged or forged. Raises PermanentError where another
        run is kept there.
        """
        has_begun = chain.length > 0 and has_state
        try:
            await self._look(chain)
            if (kept := self._kept) is None:
                return
            known = min(chain.length, len(kept.line))
            if known and manifest_hash(chain.commit(known - 1).manifest) != kept.line[known - 1]:
                self._say(
                    f"{self._folder.url} has another history of this run, which is left alone until it is replaced"
                )
                return
            for names in _parts(kept.line[chain.length :], 8 * AT_ONCE):
                commits = await _each([self._commit(name) for name in names])
                await self._in_thread(self._append, chain, commits)
            if known < len(kept.line):
                self._say(f"took over the certificates up to round {kept.round} from {self._folder.url}")
            await self._restore_renewals(renewals)
        except (NetworkError, RemoteProtocolError) as error:
            if not has_begun:
                raise
            self._say_once(f"the archive cannot be read yet: {error}")

    async def restore_state(self, store: StateStore, chain: Chain) -> None:
        """Puts the state that is there into `store`, where it is newer and of our chain. Raises StorageFull.

        Tries for as long as the storage cannot be read; what is damaged there is said, and the node goes on without.
        """
        kept, latest = self._kept, store.latest()
        if kept is None or not chain.has(kept.head, kept.round) or (latest and latest.round >= kept.round):
            return
        size = store.layout.num_values * VALUE_BYTES
        self._say(f"fetching the state of round {kept.round} from {self._folder.url} ({bytes_text(size)})")
        staging = store.stage(kept.round, None)
        try:
            await self._fill(store, staging, kept)
            await self._in_thread(staging.finish)
            if staging.finished is None or staging.finished.root != chain.commit(kept.round).manifest.state_root:
                raise StateError(f"the state of round {kept.round} is not the one that was committed")
        except StateError as error:
            store.unstage(kept.round)
            self._say(f"the archive at {self._folder.url} is damaged: {error}")
            return
        staging.publish()

    async def _fill(self, store: StateStore, staging: Staging, kept: _Kept) -> None:
        wanted = dict(enumerate(kept.tiles))
        await self._in_thread(lambda: [staging.write_state(*tile) for tile in store.recall(wanted)])
        while missing := [at for at in wanted if not staging.has(at)]:
            try:
                for some in _parts(missing, AT_ONCE):
                    await _each([self._fetch(staging, tile_id, wanted[tile_id]) for tile_id in some])
            except NetworkError as error:
                self._say_once(f"the archive cannot be read yet: {error}")
                await asyncio.sleep(LOOK_SECONDS)

    async def _fetch(self, staging: Staging, tile_id: int, name: Hash) -> None:
        data = await self._in_thread(self._folder.read, _tile(name))
        if data is None or hash_tile(data) != name:
            raise StateError(f"{_tile(name)} is {'missing' if data is None else 'not what its name says'}")
        await self._in_thread(staging.write_state, tile_id, data, name)
        await self._download(len(data))

    async def _commit(self, name: Hash) -> Commit:
        data = await self._in_thread(self._folder.read, _commit(name))
        if data is None:
            raise RemoteProtocolError(f"{_commit(name)} at {self._folder.url} is missing", fix=MEND_FIX)
        try:
            return unpack(Commit, data)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(
                f"{_commit(name)} at {self._folder.url} is damaged: {error}", fix=MEND_FIX
            ) from error

    def _append(self, chain: Chain, commits: tuple[Commit, ...]) -> None:
        ledger = chain.ledger(chain.length - 1)
        check_links(commits, chain.newest, ledger, self._run.info, self._run.rules, self._check)
        for commit in commits:
            chain.append(commit)

    async def _restore_renewals(self, folder: Path) -> None:
        for name in await self._in_thread(self._folder.sizes):
            if not name.startswith(f"{RENEWALS}/") or name.endswith(PARTIAL):
                continue
            path = folder / name.rpartition("/")[2]
            data = await self._in_thread(self._folder.read, name)
            if data is not None and not path.exists():
                folder.mkdir(exist_ok=True)
                write_whole(path, data)

    # ---------------------------------------------------------------- there

    async def keep(self, kept: Callable[[], Manifest | None], chain: Chain, store: StateStore, renewals: Path) -> None:
        """Copies each newest state there, one after the other, for ever. `kept`: the newest that is whole here."""
        while True:
            try:
                await self._look(chain)
                await self._put_renewals(renewals)
                newest = kept()
                if newest is not None and newest.round > 0 and chain.commit_of(newest) is not None:
                    await self._put(newest, chain, store.version(newest.round))
                pause = LOOK_SECONDS
            except PermanentError as error:
                self._say(f"the archive is not kept up to date any more: {error} ({error.fix})")
                await asyncio.Event().wait()
            except (NetworkError, RemoteProtocolError, StateError) as error:
                self._say_once(f"the archive is not up to date: {error}")  # a state that was left meanwhile, too
                pause = RETRY_SECONDS if isinstance(error, NetworkError) else LOOK_SECONDS
            await asyncio.sleep(pause)

    async def _put(self, manifest: Manifest, chain: Chain, version: Version) -> None:
        line = await self._in_thread(self._line_to, manifest, chain)
        known = self._kept.line if self._kept is not None else ()
        if line[-1] in known and self._has_compared:
            return  # as new as ours, or newer
        there = await self._in_thread(self._folder.sizes)  # storage that is no object store may keep part of a file
        absent = await self._in_thread(_other_commits, line, chain, there)
        for some_commits in _parts(absent, AT_ONCE):
            await _each([self._in_thread(self._put_commit, chain, at, name) for at, name in some_commits])
        if line[-1] in known[:-1]:
            self._has_compared = True
            return
        tiles = {name: tile_id for tile_id, name in enumerate(version.tile_hashes)}
        missing = [name for name in tiles if there.get(_tile(name)) != len(version.tile(tiles[name]))]
        for some in _parts(missing, AT_ONCE):
            await _each([self._put_tile(version, tiles[name], name) for name in some])
        await self._in_thread(self._folder.write, CONFIG, self._run.info.config.encode())
        kept = _Kept(line, version.tile_hashes)
        await self._in_thread(self._folder.write, _state(kept.head), b"".join((*kept.line, *kept.tiles)))
        await self._check_there(tiles)
        await self._refuse_others()
        await self._in_thread(self._folder.write, POINTER, kept.head.hex().encode())
        self._pointer, self._kept, self._said = kept.head.hex().encode(), kept, ""
        self._has_compared = True
        self._say(f"the state of round {kept.round} is at {self._folder.url}")
        await self._tidy(kept)

    async def _tidy(self, kept: _Kept) -> None:
        """Removes what does not belong to the state that is whole now. Commits stay: they are small."""
        wanted = {_state(kept.head), *map(_tile, kept.tiles)}
        old = [
            name
            for name in await self._in_thread(self._folder.sizes)
            if (name.startswith(("tiles/", "states/")) and name not in wanted) or name.endswith(PARTIAL)
        ]
        for some in _parts(old, 8 * AT_ONCE):
            await self._refuse_others()
            await _each([self._in_thread(self._folder.remove, name) for name in some])

    async def _refuse_others(self) -> None:
        """Raises PermanentError where `newest` is not what this node knows of it: somebody else writes there, too."""
        if await self._in_thread(self._folder.read, POINTER) != self._pointer:
            raise PermanentError(f"another node writes to {self._folder.url}", fix="give each node a URL of its own")

    async def _check_there(self, tiles: Iterable[Hash]) -> None:
        """Raises PermanentError where a tile that was there is gone: what is announced next must be whole."""
        self._folder.forget()
        there = await self._in_thread(self._folder.sizes)
        if gone := [name for name in tiles if _tile(name) not in there]:
            raise PermanentError(
                f"somebody has removed {len(gone)} files at {self._folder.url}", fix="give each node a URL of its own"
            )

    async def _put_renewals(self, folder: Path) -> None:
        there = await self._in_thread(self._folder.sizes)
        for path in sorted(folder.glob("*")) if folder.is_dir() else []:
            name = f"{RENEWALS}/{path.name}"
            if path.suffix != PARTIAL and there.get(name) != path.stat().st_size:
                await self._in_thread(self._folder.write, name, path.read_bytes())

    async def _put_tile(self, version: Version, tile_id: int, name: Hash) -> None:
        data = await self._in_thread(lambda: bytes(version.sound_tile(tile_id)))
        await self._upload(len(data))
        await self._in_thread(self._folder.write, _tile(name), data)

    def _put_commit(self, chain: Chain, round: int, name: Hash) -> None:
        commit = chain.commit(round)
        if manifest_hash(commit.manifest) != name:
            raise StateError("another history has won meanwhile")
        self._folder.write(_commit(name), pack(commit))

    def _line_to(self, manifest: Manifest, chain: Chain) -> tuple[Hash, ...]:
        """The hashes of our manifests up to this one; those that have not changed are not read again."""
        line = self._line[: manifest.round + 1]
        while line and not chain.has(line[-1], len(line) - 1):
            line.pop()
        line += [manifest_hash(chain.commit(round).manifest) for round in range(len(line), manifest.round + 1)]
        self._line = line
        return tuple(line)

    # ---------------------------------------------------------------- both

    async def _look(self, chain: Chain) -> None:
        """Learns, once, which state is there. None where that is damaged, but all that is there is of our chain."""
        if self._has_looked:
            return
        newest = chain.newest
        pointer = await self._in_thread(self._folder.read, POINTER)
        kept = None
        try:
            kept = await self._state_of(_name_in(pointer)) if pointer is not None else None
        except RemoteProtocolError as error:
            there = await self._in_thread(self._folder.sizes)
            if newest is None or not _is_of(await self._in_thread(self._line_to, newest.manifest, chain), there):
                raise
            self._say_once(f"{error}; this node writes it again")
        if kept is not None and not chain.has(kept.line[0], 0):
            genesis = await self._commit(kept.line[0])
            if genesis.manifest.fingerprint != self._run.info.fingerprint:
                raise PermanentError(
                    f"{self._folder.url} is the archive of another run: its fingerprint is "
                    f"{genesis.manifest.fingerprint.hex()[:16]}, that of {self._run.info.run_id} here is "
                    f"{self._run.info.fingerprint.hex()[:16]}",
                    fix="choose another --archive; to go on with that run, use its run.yaml, its data and the "
                    "organiser's identity.key",
                )
        self._pointer, self._kept, self._has_looked = pointer, kept, True

    async def _state_of(self, head: Hash) -> _Kept:
        data = await self._in_thread(self._folder.read, _state(head))
        hashes = split_hashes(data or b"")
        line, tiles = hashes[: -len(self._run.layout.tiles)], hashes[-len(self._run.layout.tiles) :]
        if not line or line[-1] != head:
            raise RemoteProtocolError(
                f"{_state(head)} at {self._folder.url} is missing, damaged, or of a run of another shape",
                fix="use the run.yaml that is there, or choose another --archive",
            )
        return _Kept(line, tiles)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)


async def run_as_it_began(folder: Path, archive: str | None, info: RunInfo) -> RunInfo:
    """See `as_it_began`: by the archive at a URL, where no run has begun in the folder. Raises NetworkError."""
    found = None
    if archive is not None and "://" in archive and not holds_run(folder):
        found = await asyncio.to_thread(_archived_run, RemoteFolder(archive), info)
    return found or as_it_began(folder, info)


def _archived_run(folder: RemoteFolder, info: RunInfo) -> RunInfo | None:
    """The run of `info` with the config that is there, where that says less (see `extends`), and the genesis there is
    of it; else None."""
    config, pointer = folder.read(CONFIG), folder.read(POINTER)
    with suppress(RemoteProtocolError, UnicodeDecodeError):
        state = None if pointer is None else folder.read(_state(_name_in(pointer)))
        genesis = None if state is None else folder.read(_commit(Hash(state[:HASH_BYTES])))
        if config is not None and genesis is not None:
            found = replace(info, config=config.decode())
            is_whole = found.fingerprint == unpack(Commit, genesis).manifest.fingerprint
            return found if is_whole and extends(info.config, found.config) else None
    return None


def _named(folder: str, name: Hash) -> str:
    return f"{folder}/{name.hex()}"


async def _each(work: Iterable[Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """All results, in order; the first failure once all have ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return tuple(results)  # type: ignore[arg-type]


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[at : at + size] for at in range(0, len(items), size))


_tile, _commit, _state = partial(_named, "tiles"), partial(_named, "commits"), partial(_named, "states")


def _other_commits(line: Sequence[Hash], chain: Chain, there: dict[str, int]) -> list[tuple[int, Hash]]:
    """The commits of `line`, with their rounds, that are not there with the size of ours."""
    sizes = chain.sizes(len(line))
    if len(sizes) < len(line):
        raise StateError("another history has won meanwhile")
    return [(at, name) for at, name in enumerate(line) if there.get(_commit(name)) != sizes[at]]


def _is_of(line: Sequence[Hash], there: dict[str, int]) -> bool:
    """Whether the archive with these files is of this history, without a state that is newer."""
    states = {name for name in there if name.startswith("states/") and not name.endswith(PARTIAL)}
    return _commit(line[0]) in there and states <= set(map(_state, line))


def _name_in(pointer: bytes) -> Hash:
    with suppress(ValueError):
        if len(name := bytes.fromhex(pointer.decode())) == HASH_BYTES:
            return Hash(name)
    raise RemoteProtocolError(
        f"the archive's file {POINTER} is damaged: {pointer[:80]!r}",
        fix="start the node that kept it once more, with its own folder: it writes the file again; or write into it "
        "the name of the last file that came to the folder states/ there",
    )
