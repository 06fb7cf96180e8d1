"""What one peer can make the others keep, or do, by what it says: bounded, whatever it signs."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.swarm.fake_keys import FakeKeys
from spes_p2p.sync.core.actions import Notice
from spes_p2p.sync.core.knowledge import MAX_NEWCOMERS, MOST_PLANS, MOST_VOTES
from spes_p2p.sync.core.messages import (
    Acceptance,
    Commit,
    Contribution,
    DegradedVote,
    Envelope,
    Intent,
    Manifest,
    Plan,
    Proposal,
    Report,
    Signed,
    plan_hash,
)
from spes_p2p.sync.core.round import Core
from spes_p2p.sync.genesis import RunInfo
from spes_p2p.sync.requests import ChainPart, Request
from spes_p2p.sync.sealing import MAX_PARTS, EnvelopeChecker
from spes_p2p.testing.sim_state import FakeSealer
from spes_p2p.testing.small_world import SmallWorld
from spes_p2p.wire import pack, unpack

LIAR = PeerId("p2")


def walk_until(wanted: Callable[[Core], object], seed: int = 0) -> Core:
    """One of the first two peers of a small world, as soon as it is as `wanted`."""
    world, chance = SmallWorld(), random.Random(seed)
    state = world.start(0)
    while True:
        for local in world.locals_of(state)[:2]:
            if local.core is not None and wanted(local.core):
                core: Core = world.snapshots.clone(local).core
                return core
        state = world.start(0) if world.is_known(state) else chance.choice(world.successors(state))[1]


@pytest.fixture(scope="module")
def said() -> list[Envelope]:
    """All messages of a round in which losses and crashes made everybody say all there is to say."""
    world = SmallWorld()
    chance = random.Random(3)
    for _ in range(12):
        state = world.start(3)
        while not world.is_over(state) and state.beats < 12:
            state = chance.choice(world.successors(state))[1]
    return [thing for thing in world.things if isinstance(thing, Envelope)]


@pytest.fixture
def core() -> Core:
    """Has a plan; nobody has voted yet."""
    return walk_until(lambda core: core.round.plan is not None)


def seal(value: Any) -> Signed[Any]:
    return FakeSealer(LIAR).seal(value)


def size_of(core: Core, act: Callable[[], None]) -> int:
    """Bytes that are still held after `act`."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_votes_of_thousands_of_ballots(core: Core) -> None:
    def flood() -> None:
        for ballot in range(2000):
            vote = Acceptance(core.rules.fingerprint, core.head, ballot, sha256(b"%d" % ballot))
            core.receive(Envelope(LIAR, votes=(seal(vote),)), 0.0)

    progress = core.round.progress_at = -1.0
    assert size_of(core, flood) < 100_000
    ballots = sorted(ballot for (ballot, _), votes in core.round.votes.items() if LIAR in votes)
    assert ballots == list(range(2000 - MOST_VOTES, 2000))  # the newest: an honest elector stands by its last
    assert core.round.progress_at == progress  # votes for what nobody proposed are no progress


def test_degraded_votes_for_thousands_of_contents(core: Core) -> None:
    for number in range(1000):
        vote = DegradedVote(core.rules.fingerprint, core.head, (LIAR,), sha256(b"%d" % number))
        core.receive(Envelope(LIAR, degraded_votes=(seal(vote),)), 0.0)
    assert len(core.round.degraded_votes) == MOST_VOTES
    twice = DegradedVote(core.rules.fingerprint, core.head, (LIAR, LIAR), NO_HASH)
    core.receive(Envelope(LIAR, degraded_votes=(seal(twice),)), 0.0)
    assert all(len(set(heard)) == len(heard) for heard, _ in core.round.degraded_votes)


def test_proposals_of_thousands_of_ballots_but_never_what_somebody_is_bound_to() -> None:
    """Of one leader's the newest are kept; what was accepted here stays whatever comes."""
    core = walk_until(lambda core: core.record.accepted is not None and core.round.decided is None and core.me != "p0")
    accepted = core.record.accepted
    assert accepted is not None
    author = accepted.author
    for ballot in range(3, 900, 3):
        members = tuple(replace(m, link_class=ballot) for m in accepted.value.manifest.members)
        other = replace(accepted.value.manifest, members=members)
        proposal = Proposal(core.head, ballot, author, other, accepted.value.wire_hashes)
        core.receive(Envelope(author, proposals=(FakeSealer(author).seal(proposal),)), 0.0)
    assert len(core.round.proposals) <= MOST_VOTES + 1
    assert ((), accepted.value.ballot) in core.round.proposals
    assert ((), 897) in core.round.proposals


def test_ever_new_plans_do_not_hold_up_a_round(core: Core) -> None:
    mine, before = core.round.plan, core.round.plans_of.get(LIAR, 0)
    assert mine is not None
    for ballot in range(1, 500):
        plan = Plan(core.rules.fingerprint, core.head, ballot, LIAR, mine.value.roster, mine.value.slices)
        core.receive(Envelope(LIAR, plan=seal(plan)), 0.0)
    assert core.round.plan is not None
    assert core.round.plan.value.ballot == MOST_PLANS - before


def test_strangers_are_few_and_silent_ones_make_room(core: Core) -> None:
    template = core.contacts[LIAR].status

    def hear(name: str, now: float) -> None:
        status = replace(template, peer=PeerId(name), incarnation=9, sequence=1, intent=Intent(joining=True))
        core.receive(Envelope(PeerId(name), (FakeSealer(PeerId(name)).seal(status),)), now)

    for number in range(500):
        hear(f"stranger {number}", 0.0)
    strangers = [peer for peer in core.contacts if peer.startswith("stranger")]
    assert len(strangers) == MAX_NEWCOMERS
    hear("late", 1.0)
    assert "late" not in core.contacts
    hear("later", core.pace.suspect_seconds + 1)  # the others fell silent
    assert "later" in core.contacts
    assert len(core.contacts) <= MAX_NEWCOMERS + 2


@pytest.mark.parametrize(
    "change",
    [
        {"reports": bytes(100_000)},
        {"staged": bytes(100_000)},
        {"unheard": tuple(PeerId(str(at)) for at in range(5000))},
        {"head": Hash(bytes(100_000))},
        {"plan": Hash(b"short")},
        {"intent": Intent(claims=tuple(range(5000)))},
        {"intent": Intent(releases=tuple(range(5000)))},
        {"round": -2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_status_of_impossible_size_is_not_kept(core: Core, change: dict[str, Any]) -> None:
    before = core.contacts[LIAR].status
    core.receive(Envelope(LIAR, (seal(replace(before, sequence=before.sequence + 1, **change)),)), 0.0)
    assert core.contacts[LIAR].status == before


def test_reports_that_cannot_be_are_not_kept(core: Core) -> None:
    plan = core.round.plan
    assert plan is not None
    core.round.reports.clear()
    name, tile = plan_hash(plan.value), sha256(b"tile")
    for report in (
        Report(name, 0, LIAR, (LIAR,), (Hash(b"no hash"),)),
        Report(name, 0, LIAR, (LIAR,), (tile,), ((LIAR, "x" * 10_000),)),
        Report(name, 0, LIAR, (LIAR,), (tile,), ((LIAR, "lost"),) * 100),
        Report(name, 0, LIAR, (), (tile,)),
        Report(name, 0, LIAR, (PeerId("nobody"),), (tile,)),
        Report(name, 7, LIAR, (LIAR,), (tile,)),
        Report(sha256(b"another plan"), 0, LIAR, (LIAR,), (tile,)),
    ):
        core.receive(Envelope(LIAR, reports=(seal(report),)), 0.0)
    assert not core.round.reports
    assert not core.round.voids


def test_what_is_of_another_parent_or_run_is_dropped(core: Core) -> None:
    other = sha256(b"another")
    name = sha256(b"manifest")
    for vote in (Acceptance(core.rules.fingerprint, other, 0, name), Acceptance(other, core.head, 0, name)):
        core.receive(Envelope(LIAR, votes=(seal(vote),)), 0.0)
    for degraded in (
        DegradedVote(core.rules.fingerprint, other, (LIAR,), name),
        DegradedVote(other, core.head, (LIAR,), name),
    ):
        core.receive(Envelope(LIAR, degraded_votes=(seal(degraded),)), 0.0)
    assert not any(LIAR in votes for votes in core.round.votes.values())
    assert not core.round.degraded_votes


def test_a_claim_beyond_the_lease_is_named(core: Core) -> None:
    """A plan that counts more than the lease can give is refused with the name of who claims it."""
    mine = core.round.plan
    assert mine is not None
    entry = Contribution(LIAR, 10**9, 1, 10**6)
    roster = (*(e for e in mine.value.roster if e.peer != LIAR), entry)
    actions = core.receive(Envelope(LIAR, plan=seal(replace(mine.value, ballot=9, leader=LIAR, roster=roster))), 0.0)
    told = [action for action in actions if isinstance(action, Notice)]
    assert [(notice.kind, notice.peer) for notice in told] == [("refused", LIAR)]
    assert "p2 claims more than its lease" in told[0].text


# ---- bytes ----


def spoilt(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                del changed[at : at + chance.randint(1, 30)]
            case 2:
                changed[at:at] = changed[at : at + chance.randint(1, 200)]
            case 3:
                changed[at] = chance.choice((0x90, 0xDC, 0xDD, 0xC6, 0xCF, 0xC0, 0xDF, 0xFF))
        if not changed:
            return b""
    return bytes(changed)


def examples(said: list[Envelope]) -> list[Any]:
    """At least one of everything that is read from the network."""
    found: dict[type, Any] = {}
    for envelope in said:
        found.setdefault(Envelope, envelope)
        if envelope.commit is not None:
            found.setdefault(Commit, envelope.commit)
            found.setdefault(Manifest, envelope.commit.manifest)
            found[ChainPart] = ChainPart((pack(envelope.commit),))
    found[Request] = Request("tiles", hashes=bytes(64))
    found[RunInfo] = RunInfo(1, "tiny", "model:\n", NO_HASH, NO_HASH, PeerId("organiser"))
    return list(found.values())


def test_every_kind_of_message_is_read_or_refused(said: list[Envelope]) -> None:
    chance = random.Random(1)
    for example in examples(said):
        for _ in range(400):
            try:
                unpack(type(example), spoilt(pack(example), chance))
            except RemoteProtocolError:
                continue


def test_spoilt_words_neither_break_the_state_machine_nor_grow_it(said: list[Envelope], core: Core) -> None:
    """Any well-formed message, whatever it says, of any author: no exception, and no more than there is room for."""
    chance, taken = random.Random(2), 0
    told = [e for e in said if e.sender != core.me and (e.votes or e.proposals or e.plan or e.reports or e.commit)]
    for _ in range(4000):
        data = pack(chance.choice(told))
        try:
            envelope = unpack(Envelope, spoilt(data, chance))
        except RemoteProtocolError:
            continue
        taken += 1
        core.receive(envelope, 0.001 * taken)
    assert taken > 500
    current = core.round
    assert sum(len(votes) for votes in current.votes.values()) <= 3 * MOST_VOTES
    assert len(current.proposals) <= 3 * MOST_VOTES + 3
    assert len(core.contacts) <= 3 + MAX_NEWCOMERS


class Verifier(FakeKeys):
    """Counts what it is asked."""

    asked = 0

    def verify(self, peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
        self.asked += 1
        return super().verify(peer, public_key, data, signature)


def test_an_envelope_of_too_many_parts_is_refused_before_its_signatures_are_checked() -> None:
    vote, keys = seal(Acceptance(NO_HASH, NO_HASH, 0, NO_HASH)), Verifier()
    data = pack(Envelope(LIAR, votes=(vote,) * (MAX_PARTS["votes"] + 1)))
    with pytest.raises(RemoteProtocolError, match="65 votes at once"):
        EnvelopeChecker(keys).open(LIAR, data)
    assert not keys.asked


def test_a_key_or_signature_of_impossible_size_is_not_looked_at() -> None:
    keys = Verifier()
    signer, checker = keys.signer(LIAR), EnvelopeChecker(keys)
    assert not checker.check(LIAR, signer.public_key + bytes(10_000), b"x", signer.sign(b"x"))
    assert not checker.check(LIAR, signer.public_key, b"x", signer.sign(b"x") + bytes(10_000))
    assert not keys.asked
    assert checker.check(LIAR, signer.public_key, b"x", signer.sign(b"x"))
