"""A run's history in lines, from a folder; and the file that a new run begins with."""

from __future__ import annotations

import asyncio
import resource
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.cli.run import history_text
from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.consensus.electorate import Faults
from spes_p2p.consensus.manifest import Decay
from spes_p2p.consensus.membership import Roll
from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import ConfigError, DataError, StorageFull
from spes_p2p.ids import PeerId
from spes_p2p.peer import organising
from spes_p2p.peer.options import JoinTarget
from spes_p2p.peer.organising import (
    MOST_ROUNDS_MORE,
    HistoryLine,
    after_ban,
    change_roll,
    check_can_fall,
    first_to_end_with,
    history,
    history_on,
    kept_history,
    last_round,
)
from spes_p2p.peer.run_file import DECIDED, NewRun, start_run
from spes_p2p.planning.units import GIB
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.organiser_words import Words, roll
from tests.cli.test_status import ANNA, REPORT, peer
from tests.peer.real import make_tokens
from tests.sync.chains import ORGANISER, A, B, MadeRun
from tests.sync.test_report import NOW, Scene

ANNAS = peer(ANNA, "member")
MINE = NewRun("mine", "tiny", "", peers=3, experts_per_peer=3)


def test_history_is_one_line_a_round_with_what_it_changed(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "run" / "chain")
    for commit in MadeRun().chain(3):
        chain.append(commit)
    lines = kept_history(tmp_path)
    assert [(line.round, line.members) for line in lines] == [(0, 1), (1, 1), (2, 1)]
    assert [line.kind for line in lines] == ["genesis", "quorum", "quorum"]
    assert (lines[0].joined, lines[1].joined, lines[1].roster, lines[1].round_tokens) == ((A,), (), (A,), 1024)
    assert all(line.received_at > 0 for line in lines)
    text = history_text(lines)
    assert "joined: a" in text
    assert len(text.splitlines()) == 1 + 3 + 1


def test_who_left_and_what_nobody_owns_is_said() -> None:
    genesis, first = MadeRun().chain(2)
    gone = replace(first, manifest=replace(first.manifest, members=(), ownership=((),) * 4))
    (_, line) = history([genesis, gone])
    assert (line.left, line.without_owner) == ((A,), (0, 1, 2, 3))
    assert "left: a; columns without owner: 0-3" in history_text([line])


def test_the_round_that_lets_the_learning_rate_fall_says_so() -> None:
    commits = MadeRun().chain(3)
    decay = Decay(commits[1].manifest.step, 500)
    fell = [replace(commit, manifest=replace(commit.manifest, decay=decay)) for commit in commits[1:]]
    lines = list(history([commits[0], *fell]))
    assert [line.decay_steps for line in lines] == [0, 500, 0]
    assert history_text(lines).count("the learning rate falls over 500 steps from here on") == 1


def test_a_learning_rate_that_has_nowhere_to_fall_to_is_an_error(tmp_path: Path) -> None:
    config = load_config(bundled_config("tiny"))  # at its lowest from step 1,000 on
    first = MadeRun().chain(2)[1].manifest
    check_can_fall(config, replace(first, step=900), tmp_path)
    with pytest.raises(ConfigError, match=r"is already at its lowest \(2.0e-04\): this changes nothing"):
        check_can_fall(config, replace(first, step=1000), tmp_path)


def test_a_learning_rate_that_has_not_risen_yet_cannot_fall(tmp_path: Path) -> None:
    """It would stay near zero for good."""
    config = load_config(bundled_config("tiny"), ["scheduler.warmup_steps=1200", "scheduler.total_steps=5000"])
    genesis, first = (commit.manifest for commit in MadeRun().chain(2))
    for early, step in ((None, "0"), (replace(genesis, step=0), "0"), (replace(first, step=1199), "1,199")):
        with pytest.raises(ConfigError, match=rf"in its warm-up, until step 1,200 \(now {step}\)") as caught:
            check_can_fall(config, early, tmp_path)
        assert caught.value.fix == "say it again when the warm-up is over"
    check_can_fall(config, replace(first, step=1200), tmp_path)
    check_can_fall(load_config(bundled_config("tiny"), ["scheduler.warmup_steps=0"]), None, tmp_path)


def test_a_second_order_to_let_the_learning_rate_fall_names_the_first(tmp_path: Path) -> None:
    config, made = load_config(bundled_config("tiny")), MadeRun()
    commits = made.chain(4)
    falling = replace(commits[3].manifest, decay=Decay(commits[2].manifest.step, 60))
    with pytest.raises(ConfigError, match=f"falling since step {commits[2].manifest.step}, over 60 steps; this cannot"):
        check_can_fall(config, falling, tmp_path)
    chain = Chain(tmp_path / "run" / "chain")
    for commit in commits[:2]:
        chain.append(commit)
    chain.append(made.certified(replace(commits[2].manifest, decay=falling.decay)))
    with pytest.raises(ConfigError, match="falling since round 2, over 60 steps"):
        check_can_fall(config, falling, tmp_path)


@pytest.mark.parametrize(
    ("age", "speed", "more"),
    [(0.0, 1024 / 300, 0), (290.0, 1024 / 300, 1), (0.0, 1024 / 5, 3), (0.0, 1e9, MOST_ROUNDS_MORE), (0.0, 0.0, 0)],
)
def test_a_run_ends_with_a_round_of_which_every_peer_has_heard(age: float, speed: float, more: int) -> None:
    newest = MadeRun().chain(2)[1]
    report = replace(REPORT, round=1, head_age_seconds=age, peers=(replace(ANNAS, tokens_per_second=speed),))
    assert first_to_end_with(report, newest) == 2 + more


def test_a_round_that_is_over_cannot_be_the_last() -> None:
    newest, report = MadeRun().chain(2)[1], replace(REPORT, round=18, peers=())
    with pytest.raises(ConfigError, match="round 5 is over: the newest is round 18"):
        last_round(report, newest, 5)
    assert [last_round(report, newest, asked) for asked in (None, 25)] == [19, 25]
    assert last_round(replace(report, last_round=18), newest, 18) == 19  # the same order again


def test_a_ban_counts_whom_a_ban_of_a_moment_before_takes_the_vote_and_spares_the_organiser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, said = MadeRun(), list[str]()
    commit = made.chain(2)[1]
    members = tuple(replace(commit.manifest.members[0], peer=PeerId(name)) for name in "abc")
    newest = replace(commit, manifest=replace(commit.manifest, members=members))
    words = roll(made.info, Words(), made.sealer(ORGANISER), banned=(A,))

    async def answer(found: object) -> object:
        return found

    monkeypatch.setattr(organising, "visit", lambda meeting, work: asyncio.run(work(None)))
    monkeypatch.setattr(organising, "find_and_load", lambda *_: answer((made.info, made.config)))
    monkeypatch.setattr(organising, "known_words", lambda *_: answer(words))
    monkeypatch.setattr(organising, "read_run", lambda *_: answer((REPORT, newest)))
    monkeypatch.setattr(organising, "organisers_sealer", lambda *_: made.sealer(ORGANISER))
    monkeypatch.setattr(organising, "tell", lambda network, info, word: answer(word))
    change_roll(Path("identity.key"), JoinTarget(), said.append, banned=(B,))
    assert said[0].startswith("1 of 3 voters stay, and a round needs 2")
    with pytest.raises(ConfigError, match="organiser is the organiser's own node"):
        change_roll(Path("identity.key"), JoinTarget(), said.append, banned=(ORGANISER,))


def test_who_bans_hears_whether_those_who_stay_can_go_on() -> None:
    commit = MadeRun().chain(2)[1]
    (member,) = commit.manifest.members
    names = [PeerId(name) for name in ("a", "b", "c")]

    def run_of(count: int) -> Commit:
        members = tuple(replace(member, peer=name) for name in names[:count])
        return replace(commit, manifest=replace(commit.manifest, members=members))

    assert after_ban(run_of(3), [PeerId("x")], Faults.CRASH) == after_ban(None, names, Faults.CRASH) == []
    assert after_ban(run_of(3), names[:1], Faults.CRASH) == ["2 of 3 voters stay: the run goes on with them"]
    (two,) = after_ban(run_of(2), names[:1], Faults.CRASH)
    assert two.startswith("1 of 2 voters stay, and a round needs 2: the run stands still until the organiser's node")
    assert "byzantine" in after_ban(run_of(3), names[:2], Faults.BYZANTINE)[0]
    assert "until somebody who may vote has come" in after_ban(run_of(1), names[:1], Faults.CRASH)[0]


def test_the_round_with_which_a_run_was_ended_says_so() -> None:
    commits = MadeRun().chain(4)
    assert [line.ends for line in history(commits, last_round=2)] == [False, False, False, True]
    assert not any(line.ends for line in history(commits, last_round=4))
    assert history_text(list(history(commits, last_round=3))).endswith("the organiser ended the run with this round")


def test_who_is_banned_is_named_in_the_round_that_takes_it_up() -> None:
    commits = MadeRun().chain(3)
    roll = Roll(commits[0].manifest.fingerprint, 1, (A,), (PeerId("mallory"),))
    later = [replace(commit, manifest=replace(commit.manifest, roll=roll)) for commit in commits[1:]]
    lines = list(history([commits[0], *later]))
    assert [(line.banned, line.electors) for line in lines] == [((), 1), (("mallory",), 1), ((), 1)]
    assert history_text(lines).count("banned: allory") == 1


def test_a_live_run_says_when_its_newest_round_came(tmp_path: Path) -> None:
    async def main() -> list[HistoryLine]:
        scene = Scene(tmp_path)
        commits = scene.run.chain(3)
        await scene.announce_run()
        await scene.announce_head(commits[-1])
        await scene.serve(commits)
        return await history_on(scene.network.peer("reader"), None, None)

    lines = asyncio.run(main())
    assert [line.received_at for line in lines] == [0.0, 0.0, NOW - 9]
    assert history_text(lines[-1:]).splitlines()[0].endswith(" when")


def test_who_stops_while_certificates_come_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread writes them down, which does not end with whoever waits for it."""
    writing, is_given_up, append = threading.Event(), threading.Event(), Chain.append
    written: list[int] = []

    def slow(chain: Chain, commit: Commit) -> None:
        writing.set()
        is_given_up.wait(60.0)
        append(chain, commit)
        written.append(commit.manifest.round)

    async def main() -> None:
        scene = Scene(tmp_path / "scene")
        commits = scene.run.chain(3)
        await scene.announce_run()
        await scene.announce_head(commits[-1])
        await scene.serve(commits)
        monkeypatch.setattr(Chain, "append", slow)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        (tmp_path / "tmp").mkdir()
        looking = asyncio.create_task(history_on(scene.network.peer("reader"), None, None))
        while not writing.is_set():
            await asyncio.sleep(0.001)
        looking.cancel()
        asyncio.get_running_loop().call_later(0.05, is_given_up.set)
        with pytest.raises(asyncio.CancelledError):
            await looking
        assert written == [0, 1, 2]

    asyncio.run(main())
    assert not list((tmp_path / "tmp").iterdir())


def test_a_folder_without_history_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no history of a run"):
        kept_history(tmp_path)


def test_a_new_run_has_a_file_a_key_and_a_plan(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "corpus", words=120_000)
    run = NewRun("mine", "small", str(tokens), 4, 2, 25, 24 * GIB, 2.5e6, 12.5e6, ("sync.codec=int8",))
    made = start_run(run, tmp_path / "mine.yaml", tmp_path / "node")
    config = load_config(made.path)
    assert (config.run.run_id, config.swarm.min_peers, config.swarm.experts_per_peer) == ("mine", 4, 2)
    assert (config.model.vocab_size, config.sync.steps_per_round, config.sync.codec) == (257, 25, "int8")
    assert (tmp_path / "node" / "identity.key").exists()
    assert made.organiser.startswith("Qm")
    assert "fit with these settings" in made.words[0]
    assert "a sync of 4 such peers takes" in made.words[1]
    tight = replace(run, gpu_bytes=2 * GIB, overrides=("model.vocab_size=60000",))
    words = start_run(tight, tmp_path / "tight.yaml", tmp_path / "node").words
    assert "they fit with optimizer.micro_batch_sequences=2" in words[0]
    again = start_run(run, tmp_path / "again.yaml", tmp_path / "node")
    assert again.organiser == made.organiser


def test_a_folder_in_which_another_run_has_begun_is_refused(tmp_path: Path) -> None:
    """The bootstrap node would refuse it, too."""
    Chain(tmp_path / "node" / "run" / "chain").append(MadeRun().chain(1)[0])
    with pytest.raises(ConfigError, match=f"another run has begun in the folder {tmp_path / 'node'}") as error:
        start_run(MINE, tmp_path / "mine.yaml", tmp_path / "node")
    assert error.value.fix == "give this one a folder of its own with --output DIR"
    assert not (tmp_path / "mine.yaml").exists()
    assert start_run(MINE, tmp_path / "mine.yaml", tmp_path / "b").path.exists()


def test_a_new_run_says_what_it_cannot_check_and_how_the_learning_rate_goes(tmp_path: Path) -> None:
    made = start_run(MINE, tmp_path / "mine.yaml", tmp_path / "node")
    text = "\n".join(made.words)
    assert "not checked whether the run fits into the volunteers' GPUs: give --gpu-memory" in text
    assert "comes to its lowest (2.0e-04) at step 1,000" in text
    assert "spes-p2p run decay), set scheduler.name=wsd" in text
    wsd = replace(MINE, overrides=("scheduler.name=wsd",))
    assert "stays until step 800" in start_run(wsd, tmp_path / "wsd.yaml", tmp_path / "node").words[-1]
    for name in DECIDED:
        assert f"\n  {name.partition('.')[2]}: " in made.path.read_text()


def test_a_new_run_with_too_little_data_is_refused(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "corpus", words=500)
    with pytest.raises(DataError, match=r"29 training sequences of 128 tokens, but a round needs 240 \("):
        start_run(replace(MINE, data=str(tokens)), tmp_path / "mine.yaml", tmp_path / "node")
    assert not (tmp_path / "mine.yaml").exists()


def test_peers_with_data_of_their_own_need_none_here(tmp_path: Path) -> None:
    made = start_run(MINE, tmp_path / "mine.yaml", tmp_path / "node")
    assert load_config(made.path).data.source == "local"


def test_answers_that_do_not_go_together_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for wrong in (
        NewRun("mine", "nothing", "", 3, 3),
        NewRun("mine", "tiny", "", 3, 99),
        NewRun("a name", "tiny", "", 3, 3),
    ):
        with pytest.raises(ConfigError):
            start_run(wrong, path, tmp_path / "node")
    with pytest.raises((ConfigError, DataError)):
        start_run(NewRun("mine", "tiny", str(tmp_path), 3, 3), path, tmp_path / "node")
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        start_run(MINE, path, tmp_path / "node")


def test_a_full_disk_leaves_no_empty_file_that_stands_in_the_way_of_the_next_try(tmp_path: Path) -> None:
    start_run(MINE, tmp_path / "other.yaml", tmp_path / "node")  # the key
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(StorageFull, match=r"mine\.yaml"):
            start_run(MINE, tmp_path / "mine.yaml", tmp_path / "node")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "mine.yaml").exists()
