"""What a peer gives to whoever asks, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.messages import (
    Commit,
)
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.exchange import requests
from spes_p2p.exchange.requests import (
    ChainPart,
    ChainRequest,
    HashesRequest,
    PackedRequest,
    Request,
    RunRequest,
    TilesRequest,
    ValuesRequest,
    WiresRequest,
    pack_request,
    unpack_request,
)
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.state.store import StateStore
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.donor import Serving
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.wire import pack, unpack
from tests.sync.chains import MadeRun

MADE = MadeRun()
COMMITS = MADE.chain(4)
PARENT = sha256(b"parent")
ASKER = PeerId("stranger")
WORK = pack(Contribution(PeerId("a"), 1, 1, 1))


class Served:
    """A store with the initial state, four commits, and values on top of one manifest."""

    def __init__(self, folder: Path) -> None:
        self.store: StateStore = MADE.store(folder / "state")
        self.chain = Chain(folder / "chain")
        for commit in COMMITS:
            self.chain.append(commit)
        self.serving = Serving(MADE.info, self.chain, self.store, self._inputs)

    def _inputs(self, parent: Hash, first: int, count: int) -> bytes | None:
        return b"values" if (parent, first, count) == (PARENT, 3, 2) else None

    def data(self, request: Request) -> bytes:
        return bytes(self.serving.answer(request, ASKER).data)


def test_the_run(tmp_path: Path) -> None:
    assert unpack(RunInfo, Served(tmp_path).data(RunRequest())) == MADE.info


def test_commits(tmp_path: Path) -> None:
    served = Served(tmp_path)
    part = unpack(ChainPart, served.data(ChainRequest(1, 2))).commits
    assert [unpack(Commit, data) for data in part] == COMMITS[1:3]
    assert unpack(ChainPart, served.data(ChainRequest(9, 2))).commits == ()


def test_a_damaged_commit_is_refused_and_not_sent(tmp_path: Path) -> None:
    served = Served(tmp_path)
    (tmp_path / "chain" / "00000001.commit").unlink()
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        served.data(ChainRequest(0, 4))


def test_values(tmp_path: Path) -> None:
    served = Served(tmp_path)
    assert served.data(ValuesRequest(PARENT, 3, 2, WORK)) == b"values"
    with pytest.raises(RemoteProtocolError, match="no values of our own"):
        served.data(ValuesRequest(NO_HASH, 3, 2, WORK))


def test_tiles_by_hash(tmp_path: Path) -> None:
    served = Served(tmp_path)
    version = served.store.version(0)
    chosen = [3, 0, 7]
    hashes = tuple(version.tile_hashes[at] for at in chosen)
    assert served.data(TilesRequest(hashes)) == b"".join(bytes(version.tile(at)) for at in chosen)


def test_tiles_of_one_answer_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tmp_path)
    hashes = served.store.version(0).tile_hashes
    monkeypatch.setattr(requests, "MAX_JOINED_BYTES", 4 * MADE.layout.tiles[0].size)
    assert served.data(TilesRequest(hashes[:1]))
    with pytest.raises(RemoteProtocolError, match="at once"):
        served.data(TilesRequest(hashes[:2]))


@pytest.mark.parametrize("count", [0, 65])
def test_lists_of_tiles_are_bounded(count: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"the length of hashes is {count}, not between 1 and"):
        unpack_request(pack(PackedRequest("tiles", pack(((bytes(32),) * count,)))))


def test_a_tile_that_is_not_here(tmp_path: Path) -> None:
    served = Served(tmp_path)
    with pytest.raises(RemoteProtocolError, match="is not here"):
        served.data(TilesRequest((served.store.version(0).tile_hashes[0], sha256(b"?"))))


def test_hash_lists_of_committed_and_of_staged_states(tmp_path: Path) -> None:
    """What was proposed is served before it is committed: others may have to repair their arithmetic by it."""
    served = Served(tmp_path)
    version = served.store.version(0)
    assert served.data(HashesRequest(version.root, 0)) == b"".join(version.tile_hashes)
    staging = served.store.stage(1, 0)
    staging.write_tile(0, bytes(4 * MADE.layout.tiles[0].size))
    with pytest.raises(RemoteProtocolError, match="no state"):
        served.data(HashesRequest(version.root, 1))
    hashes = staging.finish()
    assert served.data(HashesRequest(MADE.layout.root_of(hashes), 1)) == b"".join(hashes)
    with pytest.raises(RemoteProtocolError, match="no state"):
        served.data(HashesRequest(MADE.layout.root_of(hashes), 0))


def test_a_node_without_a_state_gives_the_chain_alone(tmp_path: Path) -> None:
    chain = Served(tmp_path).chain
    serving = Serving(MADE.info, chain, None, lambda parent, first, count: None)
    assert unpack(ChainPart, bytes(serving.answer(ChainRequest(0, 1), ASKER).data)).commits
    for request in (HashesRequest(NO_HASH, 0), TilesRequest((NO_HASH,)), ValuesRequest(NO_HASH, 0, 1, WORK)):
        with pytest.raises(RemoteProtocolError):
            serving.answer(request, ASKER)


def numbers() -> st.SearchStrategy[int]:
    return st.integers(-(2**63), 2**63 - 1)


def names() -> st.SearchStrategy[Hash]:
    return st.builds(Hash, st.binary(max_size=40))


REQUESTS: st.SearchStrategy[Request] = st.one_of(
    st.just(RunRequest()),
    st.builds(ChainRequest, numbers(), numbers()),
    st.builds(ValuesRequest, names(), numbers(), numbers(), st.just(WORK)),
    st.builds(TilesRequest, st.lists(names(), min_size=1, max_size=64).map(tuple)),
    st.builds(HashesRequest, names(), numbers()),
    st.builds(WiresRequest, numbers(), numbers()),
)


@given(REQUESTS)
def test_any_request_is_answered_or_refused(tmp_path_factory: pytest.TempPathFactory, request_: Request) -> None:
    served = _shared(tmp_path_factory)
    again = unpack_request(pack_request(request_))
    assert again == request_
    try:
        served.data(again)
    except RemoteProtocolError:
        return
    assert isinstance(again, RunRequest | ChainRequest)


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown kind of request 'other'"):
        unpack_request(pack(PackedRequest("other", b"")))
    with pytest.raises(RemoteProtocolError, match="ChainRequest"):
        unpack_request(pack(PackedRequest("chain", pack(RunRequest()))))


_SERVED: list[Served] = []


def _shared(factory: pytest.TempPathFactory) -> Served:
    if not _SERVED:
        _SERVED.append(Served(factory.mktemp("served")))
    return _SERVED[0]
