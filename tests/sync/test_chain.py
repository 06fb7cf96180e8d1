"""Commits on disk, and the voting record that must survive."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import (
    Commit,
)
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError, StateError, StorageFull
from spes_p2p.ids import NO_HASH, sha256
from spes_p2p.sync.chain import Chain, CommitFiles, VoteBook, check_links
from spes_p2p.wire import pack, unpack
from tests.state.small import file_size_limit
from tests.sync.chains import B, MadeRun, with_tokens

RUN = MadeRun()
COMMITS = RUN.chain(5)


def filled(folder: Path, count: int = 4) -> Chain:
    chain = Chain(folder)
    for commit in COMMITS[:count]:
        chain.append(commit)
    return chain


def test_what_was_appended_is_there_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path)
    again = Chain(tmp_path)
    assert again.length == 4
    assert again.newest == COMMITS[3]
    assert [again.commit(round) for round in range(4)] == COMMITS[:4]


def test_an_empty_chain_has_nothing(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "chain")
    assert (chain.length, chain.newest, chain.part(0, 9, 10**6)) == (0, None, ())


def test_a_commit_that_is_here_is_not_written_again(tmp_path: Path) -> None:
    chain = filled(tmp_path)
    chain.append(COMMITS[1])
    assert (chain.length, chain.newest) == (4, COMMITS[3])


def test_a_commit_that_two_threads_bring_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be heard of while it is fetched, too: one would take the other's temporary file away."""
    chain, honest = filled(tmp_path), CommitFiles.write
    others, at_once = threading.Barrier(2), []

    def write(files: CommitFiles, commit: Commit) -> None:
        try:
            others.wait(0.3)  # the other one would be here, too
            at_once.append(commit)
        except threading.BrokenBarrierError:
            honest(files, commit)

    monkeypatch.setattr(CommitFiles, "write", write)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(chain.append, [COMMITS[4]] * 2))
    assert not at_once
    assert Chain(tmp_path).newest == chain.newest == COMMITS[4]


def test_another_commit_ends_the_branch_in_its_place(tmp_path: Path) -> None:
    chain = filled(tmp_path)
    other = RUN.certified(with_tokens(COMMITS[2], 99).manifest)
    chain.append(other)
    for seen in (chain, Chain(tmp_path)):
        assert (seen.length, seen.newest) == (3, other)


def test_a_gap_is_never_made(tmp_path: Path) -> None:
    chain = filled(tmp_path, 2)
    with pytest.raises(LocalProtocolError, match="round 3 does not follow 2"):
        chain.append(COMMITS[3])


def test_parts_are_bounded_by_number_and_bytes(tmp_path: Path) -> None:
    chain = filled(tmp_path)
    assert [unpack(Commit, data) for data in chain.part(1, 2, 10**6)] == COMMITS[1:3]
    assert len(chain.part(1, 99, len(pack(COMMITS[1])))) == 1
    assert len(chain.part(1, 99, 0)) == 1  # the first one goes out whatever its size
    assert chain.part(4, 9, 10**6) == ()


@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, length: int) -> None:
    filled(tmp_path)
    path = tmp_path / "00000003.commit"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(StateError, match=r"00000003\.commit is damaged") as caught:
        Chain(tmp_path)
    assert "join again" in caught.value.fix


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "00000001.commit").unlink()
    with pytest.raises(StateError, match="lacks the commit of round 1"):
        Chain(tmp_path)


def test_files_of_others_do_not_matter(tmp_path: Path) -> None:
    filled(tmp_path)
    for name in ("00000009.commit.tmp", "notes.txt", "9.commit"):
        (tmp_path / name).write_bytes(b"")
    assert Chain(tmp_path).length == 4


def test_a_full_disk_leaves_the_chain_as_it_was(tmp_path: Path) -> None:
    chain = filled(tmp_path, 2)
    with file_size_limit(10), pytest.raises(StorageFull):
        chain.append(COMMITS[2])
    for seen in (chain, Chain(tmp_path)):
        assert (seen.length, seen.newest) == (2, COMMITS[1])


OTHERS = [COMMITS[0], RUN.certified(RUN.child(COMMITS[0].manifest, sha256(b"another state"), sha256(b"wire")))]


def test_another_history_with_fewer_rounds_takes_the_place_of_ours(tmp_path: Path) -> None:
    chain = filled(tmp_path)
    os.utime(tmp_path / "00000003.commit", (1e9, 1e9))
    assert chain.received_of(COMMITS[3].manifest) == Chain(tmp_path).received_at(3) == 1e9
    assert Chain(tmp_path).newest_received == (COMMITS[3], 1e9)
    assert chain.commit_of(COMMITS[3].manifest) == COMMITS[3]
    assert chain.parent_of(COMMITS[3].manifest) == COMMITS[2].manifest
    assert chain.child_of(COMMITS[1].manifest) == COMMITS[2].manifest
    chain.switch(OTHERS[1:])
    assert chain.newest_received == (OTHERS[1], chain.received_at(1))
    for lost in COMMITS[1:]:
        assert (chain.commit_of(lost.manifest), chain.child_of(lost.manifest)) == (None, None)
        assert chain.received_of(lost.manifest) is None
    assert chain.parent_of(COMMITS[2].manifest) is None
    assert chain.parent_of(COMMITS[1].manifest) == chain.parent_of(OTHERS[1].manifest) == COMMITS[0].manifest
    assert chain.child_of(COMMITS[0].manifest) == OTHERS[1].manifest
    assert (chain.find(2), chain.find(-1), chain.parent_of(COMMITS[0].manifest)) == (None, None, None)


def test_readers_in_other_threads_see_one_history_or_the_other(tmp_path: Path) -> None:
    """Whoever announces or serves reads while the disk's thread goes over, in either direction."""
    chain = filled(tmp_path)
    wholes = [tuple(map(pack, line)) for line in (COMMITS[:4], OTHERS)]
    seen: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            newest, part = chain.newest_received, chain.part(0, 9, 10**6)
            assert newest is not None
            assert newest[0] in (COMMITS[3], OTHERS[1])
            assert part in wholes
            assert chain.find(3) in (None, COMMITS[3])
            chain.received_of(COMMITS[3].manifest)
            chain.has(COMMITS[0].manifest.parent, 3)
            seen.append(part)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for _ in range(40):
            chain.switch(OTHERS[1:])
            chain.switch(COMMITS[1:4])
        done.set()
        reading.result()
    assert seen


def test_known_heads(tmp_path: Path) -> None:
    chain = filled(tmp_path)
    heads = [manifest_hash(commit.manifest) for commit in COMMITS]
    assert all(chain.knows(head, 3) for head in heads[:4])
    assert not chain.knows(heads[3], 2)
    assert not chain.knows(heads[4], 3)
    assert not chain.knows(sha256(b"?"), 3)


def test_whether_a_head_is_ours_is_known_without_a_look_at_manifests(tmp_path: Path) -> None:
    """They may be large, and a stranger's message may name a thousand heads."""
    chain = filled(tmp_path)
    path = tmp_path / "00000002.commit"
    path.write_bytes(path.read_bytes()[: 1 + len(pack(COMMITS[2].certificate))])
    assert chain.has(manifest_hash(COMMITS[2].manifest), 2)
    assert not chain.has(manifest_hash(COMMITS[1].manifest), 2)
    assert not chain.has(manifest_hash(COMMITS[4].manifest), 4)
    assert not chain.has(manifest_hash(COMMITS[3].manifest), -1)


@pytest.mark.parametrize("round", [0, 2, 3])
def test_a_damaged_commit_is_known_by_its_child_and_told_once(tmp_path: Path, round: int) -> None:
    """Anybody can ask for any round; the newest one is known in any case."""
    chain = filled(tmp_path)
    (tmp_path / f"{round:08d}.commit").write_bytes(b"damaged")
    for _ in range(2):
        assert chain.has(manifest_hash(COMMITS[round].manifest), round)
        assert not chain.has(manifest_hash(COMMITS[4].manifest), round)
    [problem] = chain.problems
    assert f"{round:08d}.commit is damaged" in problem
    assert "join again" in problem


def test_a_damaged_commit_that_can_be_read_all_the_same_is_found(tmp_path: Path) -> None:
    """One wrong bit seldom spoils the form."""
    chain, commit = filled(tmp_path), COMMITS[2]
    certificate = replace(commit.certificate, parent=sha256(b"another"))
    for wrong in (with_tokens(commit, 7), replace(commit, certificate=certificate)):
        (tmp_path / "00000002.commit").write_bytes(pack(wrong))
        for read in (lambda: chain.commit(2), lambda: Chain(tmp_path)):
            with pytest.raises(StateError, match=r"00000002\.commit is damaged: .* not the one that its certificate"):
                read()


def test_two_damaged_commits_in_a_row(tmp_path: Path) -> None:
    chain = filled(tmp_path)
    for round in (1, 2):
        (tmp_path / f"{round:08d}.commit").unlink()
    assert not chain.has(manifest_hash(COMMITS[1].manifest), 1)
    assert chain.has(manifest_hash(COMMITS[2].manifest), 2)
    assert len(chain.problems) == 2


def links(*commits: Commit, before: Commit | None = None) -> None:
    check_links(commits, before, RUN.info, RUN.rules, RUN.keys.verify)


def test_links_that_fit() -> None:
    links(*COMMITS)
    links(*COMMITS[2:], before=COMMITS[1])


@pytest.mark.parametrize(
    ("chain", "before", "complaint"),
    [
        ([COMMITS[1]], None, "not the genesis"),
        ([COMMITS[0]], COMMITS[0], "does not follow"),
        ([COMMITS[3]], COMMITS[1], "does not follow"),
        ([with_tokens(COMMITS[2], 5)], COMMITS[1], "tokens does not follow"),
        ([RUN.genesis(sha256(b"state 0"), signer=B)], None, "not signed by the organiser"),
        ([RUN.certified(COMMITS[1].manifest, signer=B)], COMMITS[0], "0 valid seals from 1"),
    ],
)
def test_links_that_do_not_fit(chain: list[Commit], before: Commit | None, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        links(*chain, before=before)


# ---- votes ----


def book(folder: Path, start: int) -> VoteBook:
    return VoteBook(folder, itertools.count(start).__next__)


def test_votes_and_incarnation_survive(tmp_path: Path) -> None:
    first = book(tmp_path, 7)
    first.write(VoteRecord(sha256(b"head"), locked_ballot=3))
    again = book(tmp_path, 8)
    assert (again.record, again.incarnation) == (VoteRecord(sha256(b"head"), locked_ballot=3), 7)


@pytest.mark.parametrize("damage", ["votes lost", "votes cut", "incarnation lost", "incarnation cut"])
def test_without_a_whole_record_it_is_a_newcomer(tmp_path: Path, damage: str) -> None:
    book(tmp_path, 7).write(VoteRecord(sha256(b"head"), locked_ballot=3))
    what, how = damage.split()
    path = tmp_path / what
    path.unlink() if how == "lost" else path.write_bytes(path.read_bytes()[:0])
    again = book(tmp_path, 8)
    assert (again.record, again.incarnation) == (VoteRecord(NO_HASH), 8)
    assert book(tmp_path, 9).incarnation == 8


def test_to_forget_is_to_begin_anew(tmp_path: Path) -> None:
    first = book(tmp_path, 7)
    first.write(VoteRecord(sha256(b"head"), locked_ballot=3))
    first.forget()
    assert (first.record, first.incarnation) == (VoteRecord(NO_HASH), 8)
    assert book(tmp_path, 9).incarnation == 8


def test_a_vote_on_a_full_disk_is_not_noted(tmp_path: Path) -> None:
    first = book(tmp_path, 7)
    with file_size_limit(1), pytest.raises(StorageFull):
        first.write(VoteRecord(sha256(b"head"), locked_ballot=3))
    assert first.record == VoteRecord(NO_HASH)
    assert book(tmp_path, 9).record == VoteRecord(NO_HASH)


def test_who_forgets_on_a_full_disk_never_votes_in_the_old_incarnation_again(tmp_path: Path) -> None:
    first = book(tmp_path, 7)
    first.write(VoteRecord(sha256(b"head"), locked_ballot=3))
    with file_size_limit(1), pytest.raises(StorageFull):
        first.forget(above=100)
    assert (first.record, first.incarnation) == (VoteRecord(NO_HASH), 101)
    first.write(VoteRecord(sha256(b"head"), locked_ballot=1))
    assert book(tmp_path, 200).incarnation >= 101


def test_who_only_looks_ends_no_switch_of_another(tmp_path: Path) -> None:
    chain = filled(tmp_path)
    (tmp_path / "00000002.next").write_bytes(b"a switch that the owner is about to make")
    assert Chain(tmp_path, mends=False).length == chain.length
    assert (tmp_path / "00000002.next").exists()


def test_a_damaged_switch_is_named(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "switch").write_bytes(b"\xb3")
    with pytest.raises(StateError, match="switch is damaged") as caught:
        Chain(tmp_path)
    assert "join again" in caught.value.fix
