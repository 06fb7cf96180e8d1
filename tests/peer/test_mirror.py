"""What a mirror copies, what it keeps, and what it refuses to be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.data.piece_cache import PieceCache
from spes_p2p.errors import ConfigError, RemoteProtocolError
from spes_p2p.ids import NO_HASH, PeerId
from spes_p2p.peer.folder import INFO_FILE, RUN, kept_run
from spes_p2p.peer.mirror import Mirror, absent_pieces
from spes_p2p.peer.options import JoinTarget
from spes_p2p.sync.genesis import RunInfo, describe_run
from spes_p2p.wire import pack
from tests.data.piece_makers import make_pieces

INFO = describe_run(load_config(bundled_config("tiny")), NO_HASH, PeerId("organiser"))
NOT_ASKED: Any = None


def keep(folder: Path, info: RunInfo) -> None:
    (folder / RUN).mkdir(parents=True)
    (folder / RUN / INFO_FILE).write_bytes(pack(info))


def find(folder: Path, me: str, meeting: JoinTarget) -> Mirror:
    """Without a network: the run is what the folder keeps."""
    network = cast(Any, SimpleNamespace(signer=SimpleNamespace(peer_id=me), directory=NOT_ASKED))
    return asyncio.run(Mirror.find(network, meeting, folder, lambda text: None))


def test_every_piece_is_copied_that_has_room(tmp_path: Path) -> None:
    pieces = make_pieces(tmp_path / "whole", (400,))
    slot = pieces.grid.max_bytes + 8
    for slots in (pieces.grid.total, 7):
        cache = PieceCache(tmp_path / str(slots), pieces.grid, slots * slot)
        while absent := absent_pieces(cache, 5):
            assert len(absent) <= 5
            for piece in absent:
                assert cache.put(piece, pieces.find(piece) or b"")
        assert cache.held == slots
        cache.close()


def test_a_run_that_was_mirrored_is_known_again_and_no_other(tmp_path: Path) -> None:
    assert kept_run(tmp_path, None) is None
    keep(tmp_path, INFO)
    name = INFO.fingerprint.hex()
    assert kept_run(tmp_path, name[:16]) == kept_run(tmp_path, None) == INFO
    assert kept_run(tmp_path, "0000") is None
    (tmp_path / RUN / INFO_FILE).write_bytes(b"damaged")
    assert kept_run(tmp_path, None) is None


def test_it_starts_from_what_it_keeps_when_nobody_answers(tmp_path: Path) -> None:
    keep(tmp_path, INFO)
    found = find(tmp_path, "mirror", JoinTarget((), "tiny", INFO.fingerprint.hex(), INFO.organiser))
    assert (found.run.info, found.run.config.run.run_id) == (INFO, "tiny")


def test_the_organisers_own_folder_is_no_mirror(tmp_path: Path) -> None:
    keep(tmp_path, INFO)
    with pytest.raises(ConfigError, match="holds the organiser's key of run tiny") as caught:
        find(tmp_path, INFO.organiser, JoinTarget())
    assert "--output" in caught.value.fix


def test_another_organisers_invitation_is_refused(tmp_path: Path) -> None:
    keep(tmp_path, INFO)
    with pytest.raises(RemoteProtocolError, match="belongs to organiser organiser"):
        find(tmp_path, "mirror", JoinTarget((), "tiny", None, PeerId("somebody")))
