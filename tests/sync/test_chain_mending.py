"""Which certificates a peer takes from others in the place of damaged ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import StateError
from spes_p2p.ids import PeerId, sha256
from spes_p2p.sync import chain_mending
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.chain_mending import opened_chain
from spes_p2p.wire import pack
from tests.sync.chains import ORGANISER, A, B, MadeRun

RUN = MadeRun()
COMMITS = RUN.chain(5)


def forked(after: int) -> list[Commit]:
    """A history that parted from ours after a round, as well signed as ours."""
    commits = COMMITS[: after + 1]
    for round in range(after + 1, len(COMMITS)):
        manifest = RUN.child(commits[-1].manifest, sha256(b"another %d" % round), sha256(b"wire"))
        commits.append(RUN.certified(manifest))
    return commits


def damaged(folder: Path, rounds: Sequence[int]) -> None:
    chain = Chain(folder)
    for commit in COMMITS:
        chain.append(commit)
    for round in rounds:
        (folder / f"{round:08d}.commit").write_bytes(b"damaged")


def opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, holders: dict[PeerId, Sequence[Commit]], at_once: int = 64
) -> tuple[Chain, list[PeerId]]:
    """The chain, and who was asked for it."""
    asked: list[PeerId] = []

    async def commits_from(transfers: object, holder: PeerId, first: int) -> tuple[Commit, ...]:
        asked.append(holder)
        return tuple(holders[holder][first : first + at_once])

    async def sources() -> list[PeerId]:
        return list(holders)

    monkeypatch.setattr(chain_mending, "commits_from", commits_from)
    run: Any = SimpleNamespace(info=RUN.info, rules=RUN.rules, transfers=lambda transport: None)
    node: Any = SimpleNamespace(
        me="me", transport=None, checker=SimpleNamespace(check=RUN.keys.verify), say=lambda text: None
    )
    return asyncio.run(opened_chain(folder, run, node, sources)), asked


@pytest.mark.parametrize("at_once", [1, 64])
@pytest.mark.parametrize("rounds", [(1,), (2, 3), (1, 3), (3, 4)])
def test_damaged_ones_are_taken_from_who_has_those_of_this_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: tuple[int, ...], at_once: int
) -> None:
    """Of those before a readable one, also where several follow each other: the first renewed would fit."""
    damaged(tmp_path, rounds)
    other: Sequence[Commit] = COMMITS[:4] if 4 in rounds else forked(rounds[0] - 1)
    chain, _ = opened(tmp_path, monkeypatch, {A: other, B: COMMITS}, at_once)
    assert [chain.commit(round) for round in range(5)] == COMMITS


def test_one_that_can_be_read_all_the_same_is_taken_from_others_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged(tmp_path, [])
    changed = replace(COMMITS[3], manifest=replace(COMMITS[3].manifest, roster=()))
    (tmp_path / "00000003.commit").write_bytes(pack(changed))
    chain, _ = opened(tmp_path, monkeypatch, {A: COMMITS})
    assert [chain.commit(round) for round in range(5)] == COMMITS


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_newest_is_one_with_a_quorum_where_a_member_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """Who was cut off stands on a renewal. Strangers are not waited for where there is one."""
    damaged(tmp_path, [4])
    renewed = RUN.renewal(COMMITS[3].manifest)
    last = COMMITS if is_ours else ()
    chain, asked = opened(tmp_path, monkeypatch, {A: [*COMMITS[:4], renewed], B: COMMITS, ORGANISER: last})
    assert chain.commit(4) == (COMMITS[4] if is_ours else renewed)
    assert asked == [A, ORGANISER]


def test_what_no_elector_has_signed_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged(tmp_path, [4])
    forged = RUN.certified(RUN.child(COMMITS[3].manifest, sha256(b"false"), sha256(b"wire")), B)
    with pytest.raises(StateError, match="damaged"):
        opened(tmp_path, monkeypatch, {B: [*COMMITS[:4], forged]})
    with pytest.raises(StateError, match="damaged"):
        Chain(tmp_path)


def test_strangers_are_asked_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged(tmp_path, [2])
    _, asked = opened(tmp_path, monkeypatch, {B: COMMITS, A: (), ORGANISER: ()})
    assert asked == [A, ORGANISER, B]


def test_what_the_directory_still_says_of_this_node_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged(tmp_path, (2,))
    stranger = PeerId("stranger")
    chain, asked = opened(tmp_path, monkeypatch, {PeerId("me"): COMMITS, stranger: COMMITS})
    assert chain.commit(2) == COMMITS[2]
    assert asked == [stranger]
