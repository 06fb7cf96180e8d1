"""All that one elector may sign that an honest one never would, given all that anybody knows: see `chooser`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from spes_p2p.consensus.content import Content, Envelope
from spes_p2p.consensus.electorate import NIL
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import (
    QUORUM,
    RENEWAL,
    Ballots,
    Certificate,
    Commit,
    Plan,
    Polka,
    Precommit,
    Prevote,
    Proposal,
    Renewal,
    Report,
    Seal,
    Signed,
    Status,
    Votes,
    plan_hash,
)
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.slices import reducer_order
from spes_p2p.consensus.statements import content_of
from spes_p2p.ids import Hash, PeerId, sha256
from tests.simulation.sim_state import FakeSealer

UNKNOWN = sha256(b"what nobody has made")


class Lies:
    """All that `liar` may sign for one receiver, given what anybody knows. Leaves out when it is said."""

    def __init__(self, liar: PeerId, rules: RunRules) -> None:
        self._liar, self._rules = liar, rules
        self._sealer = FakeSealer(liar)
        self._false: dict[Hash, tuple[Content, ...]] = {}

    def for_peer(self, core: Consensus, everybody: list[Consensus]) -> Iterator[tuple[str, Envelope]]:
        """(what it is, message) for the peer with `core`."""
        for told, envelope in (
            *self._votes(core, everybody),
            *self._proposals(core, everybody),
            *self._plans(core, everybody),
            *self._reports(core),
            *self._statuses(core),
            *self._commits(core, everybody),
        ):
            yield told, replace(envelope, sender=self._liar)

    def _contents(self, everybody: list[Consensus]) -> dict[Hash, Content]:
        """What was built, and false ones made of it."""
        known = {name: content for core in everybody for name, content in core.state.round.contents.items()}
        for name, content in list(known.items()):
            if name not in self._false:
                self._false[name] = tuple(self._falsified(everybody[0], content))
                self._false |= {manifest_hash(false.manifest): () for false in self._false[name]}
            known |= {manifest_hash(false.manifest): false for false in self._false[name]}
        return known

    def _falsified(self, core: Consensus, content: Content) -> Iterator[Content]:
        """Without itself, which is in order; without another; with other work, another state, other members."""
        manifest, said = content.manifest, content.statements
        others = [word.author for word in said.declarations if word.author != self._liar]
        for left_out in (self._liar, others[0]):
            words = tuple(word for word in said.declarations if word.author != left_out)
            statements = replace(said, declarations=words)
            yield content_of(self._rules, core.tip, statements, manifest.state_root, manifest.merge)
        for wrong in (
            replace(manifest, tokens=manifest.tokens + 1),
            replace(manifest, state_root=UNKNOWN),
            replace(manifest, members=manifest.members[1:]),
        ):
            yield Content(wrong, said)

    def _votes(self, core: Consensus, everybody: list[Consensus]) -> Iterator[tuple[str, Envelope]]:
        """Votes for anything in the ballots about that of the receiver: two of one ballot, and stale ones, too."""
        run, parent = self._rules.fingerprint, core.tip_hash
        ballot = core.state.round.vote.ballot
        for at in range(max(0, ballot - 1), ballot + 2):
            for value in (NIL, UNKNOWN, *sorted(self._contents(everybody))):
                prevote = self._sealer.seal(Prevote(run, parent, at, value))
                precommit = self._sealer.seal(Precommit(run, parent, at, value))
                for told, votes in (
                    ("prevotes", Votes(prevote)),
                    ("precommits", Votes(precommit=precommit)),
                    ("votes", Votes(prevote, precommit)),
                ):
                    yield f"{told} {value.hex()[:4]} in {at}", Envelope(self._liar, votes=(votes,))
        for value in self._contents(everybody):
            alone = Polka(ballot, value, (self._sealer.seal(Prevote(run, parent, ballot, value)),) * 3)
            yield f"polka of its own for {value.hex()[:4]}", Envelope(self._liar, votes=(Votes(polka=alone),))

    def _proposals(self, core: Consensus, everybody: list[Consensus]) -> Iterator[tuple[str, Envelope]]:
        """Anything in the ballots that it leads, with every polka there is, and with one that says something else."""
        run, parent = self._rules.fingerprint, core.tip_hash
        electorate, ballot = core.state.electorate, core.state.round.vote.ballot
        polkas = {polka for one in everybody if (polka := one.state.round.vote.heard.polka) is not None}
        contents: dict[Hash, Content | None] = {UNKNOWN: None, **self._contents(everybody)}
        for at in range(max(0, ballot - 1), ballot + 2):
            if electorate.leader(at) != self._liar:
                continue
            for value, content in contents.items():
                for polka in (None, *sorted(polkas, key=lambda polka: (polka.ballot, polka.value))):
                    proposal = self._sealer.seal(Proposal(run, parent, at, value, polka))
                    backed = "" if polka is None else f" with polka {polka.ballot}"
                    brought = () if content is None else (content,)
                    envelope = Envelope(self._liar, votes=(Votes(proposal=proposal),), contents=brought)
                    yield f"proposes {value.hex()[:4]} in {at}{backed}", envelope

    def _plans(self, core: Consensus, everybody: list[Consensus]) -> Iterator[tuple[str, Envelope]]:
        """Plans that leave somebody out, in the ballots that it leads."""
        ready = {entry: signed for one in everybody for entry, signed in one.state.round.ready.items()}
        plans = [one.state.round.plan.value for one in everybody if one.state.round.plan is not None]
        ballot = core.state.round.vote.ballot
        for at in (ballot, ballot + 1):
            if core.state.electorate.leader(at) != self._liar or not plans:
                continue
            for left_out in core.state.electors:
                roster = tuple(entry for entry in plans[0].roster if entry.peer != left_out)
                staying = tuple(entry.peer for entry in roster)
                if not staying or staying == tuple(entry.peer for entry in plans[0].roster):
                    continue
                slices = tuple(replace(piece, reducer=staying[0], contributors=staying) for piece in plans[0].slices)
                plan = Plan(plans[0].fingerprint, core.tip_hash, at, self._liar, roster, slices)
                brought = tuple(ready[entry] for entry in roster)
                yield (
                    f"plans without {left_out} in {at}",
                    Envelope(self._liar, plan=self._sealer.seal(plan), ready=brought),
                )

    def _reports(self, core: Consensus) -> Iterator[tuple[str, Envelope]]:
        """That it reduced what nobody can fetch, of all or of some; or that nobody's values are fit."""
        if core.state.round.plan is None:
            return
        plan = core.state.round.plan.value
        for index, piece in enumerate(plan.slices):
            if self._liar not in reducer_order(piece, core.state.electors):
                continue
            for used in (piece.contributors, (self._liar,), ()):
                mine = replace(piece, reducer=self._liar, contributors=used)
                tiles = (UNKNOWN,) * (piece.tiles if used else 0)
                out = tuple((peer, "lost") for peer in piece.contributors if peer not in used)
                report = Report(plan.parent, plan_hash(plan), index, mine, tiles, out)
                yield (
                    f"reports slice {index} of {len(used)}",
                    Envelope(self._liar, reports=(self._sealer.seal(report),)),
                )

    def _statuses(self, core: Consensus) -> Iterator[tuple[str, Envelope]]:
        """What it says of itself: work, wishes, where it stands, how it voted, what it has."""
        contact = core.state.others.contacts.get(self._liar)
        if contact is None:
            return
        true = replace(contact.status, sequence=contact.status.sequence + 1)
        ballot = core.state.round.vote.ballot
        values = sorted(core.state.round.contents)
        lies: dict[str, Status] = {
            "trains on": replace(true, work=replace(true.work, ready=False)),
            "trained more": replace(
                true, work=replace(true.work, ready=True, tokens=8 * true.work.tokens + 8, steps=8)
            ),
            "leaves": replace(true, intent=replace(true.intent, leaving=True)),
            "cannot vote": replace(true, intent=replace(true.intent, can_vote=False)),
            "is behind NAT": replace(true, intent=replace(true.intent, link_class=1)),
            "stands further": replace(true, head=UNKNOWN, round=true.round + 5, counted=true.counted + 5),
            "counts more": replace(true, counted=true.counted + 10**6),
            "knows a roll": replace(true, head=UNKNOWN, roll=7),
            "hears no voter": replace(true, silent=tuple(core.state.electors)),
            "stands elsewhere": replace(true, head=UNKNOWN),
            "is behind": replace(true, head=UNKNOWN, round=-1),
            "hears nobody": replace(true, unheard=tuple(core.state.electors)),
            "lacks much": replace(true, lacks=(UNKNOWN, *values)[:8]),
            "moves bytes": replace(true, moved=true.moved + 1),
            "has all": replace(true, reports=b"\1", staged=b"\1", proposal=ballot + 1),
        }
        for at in (ballot, ballot + 1):
            lies[f"closes in {at}"] = replace(true, ballots=replace(true.ballots, closing=at))
            lies[f"has voted in {at}"] = replace(true, ballots=Ballots(at, at, at))
        for told, status in lies.items():
            if status != true:
                yield told, Envelope(self._liar, statuses=(self._sealer.seal(status),))

    def _commits(self, core: Consensus, everybody: list[Consensus]) -> Iterator[tuple[str, Envelope]]:
        """Certificates of fewer than a quorum: a real precommit and its own, its own thrice, or itself alone."""
        run, parent, ballot = self._rules.fingerprint, core.tip_hash, core.state.round.vote.ballot
        heard = [vote for one in everybody for vote in one.state.round.vote.heard.precommits.values()]
        for value, content in self._contents(everybody).items():
            mine = self._sealer.seal(Precommit(run, parent, ballot, value))
            real = {vote.author: vote for vote in heard if (vote.value.ballot, vote.value.value) == (ballot, value)}
            some = [real[author] for author in sorted(real) if author != self._liar][:1]
            vote = self._sealer.seal(Renewal(run, parent, value))
            for told, certificate in (
                ("too few", Certificate(parent, QUORUM, ballot, value, _seals((*some, mine)))),
                ("itself thrice", Certificate(parent, QUORUM, ballot, value, _seals((mine,) * 3))),
                ("it alone", Certificate(parent, RENEWAL, 0, value, _seals((vote,)))),
            ):
                commit = Commit(certificate, content.manifest)
                yield f"certificate by {told} of {value.hex()[:4]}", Envelope(self._liar, commit=commit)


def _seals(votes: tuple[Signed[Precommit] | Signed[Renewal], ...]) -> tuple[Seal, ...]:
    return tuple(Seal(vote.author, vote.public_key, vote.signature) for vote in votes)
