"""The parts of the state machine, and how they are put together. Each has one job, and is given the parts that it asks.

Read from the top: what stands further down knows what stands above it, never the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.following import Following
from spes_p2p.consensus.gossip import Gossip
from spes_p2p.consensus.holders import Holders
from spes_p2p.consensus.inbound import Inbound
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.lifecycle import Lifecycle
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.quorum import Quorum
from spes_p2p.consensus.reducing import Reducing
from spes_p2p.consensus.renewing import Renewing
from spes_p2p.consensus.round_plan import RoundPlan
from spes_p2p.consensus.staging import Staging
from spes_p2p.consensus.state import State
from spes_p2p.consensus.statuses import Statuses
from spes_p2p.consensus.voting import Voting


@dataclass(frozen=True)
class PartClasses:
    """Which class plays which part. A test plants a fault by exchanging one."""

    contacts: type[Contacts] = Contacts
    holders: type[Holders] = Holders
    leadership: type[Leadership] = Leadership
    members: type[Members] = Members
    proposals: type[Proposals] = Proposals
    staging: type[Staging] = Staging
    round_plan: type[RoundPlan] = RoundPlan
    reducing: type[Reducing] = Reducing
    voting: type[Voting] = Voting
    lifecycle: type[Lifecycle] = Lifecycle
    quorum: type[Quorum] = Quorum
    renewing: type[Renewing] = Renewing
    following: type[Following] = Following
    statuses: type[Statuses] = Statuses
    gossip: type[Gossip] = Gossip
    inbound: type[Inbound] = Inbound


class Parts:
    """All parts over one state."""

    def __init__(self, state: State, classes: PartClasses) -> None:
        self.contacts = contacts = classes.contacts(state)
        self.holders = holders = classes.holders(state, contacts)
        self.leadership = leadership = classes.leadership(state, contacts)
        self.proposals = proposals = classes.proposals(state, contacts, leadership)
        self.members = members = classes.members(state, contacts, leadership, proposals)
        self.staging = staging = classes.staging(state, contacts, holders, proposals)
        self.round_plan = classes.round_plan(state, contacts, leadership, members)
        self.reducing = classes.reducing(state, contacts, proposals, staging)
        self.voting = voting = classes.voting(state, contacts, leadership, members, proposals)
        self.lifecycle = lifecycle = classes.lifecycle(state, contacts, self.round_plan, staging, voting)
        self.quorum = classes.quorum(state, contacts, members, proposals)
        self.renewing = classes.renewing(state, contacts, leadership, voting)
        self.following = classes.following(state, contacts, proposals, lifecycle)
        self.statuses = statuses = classes.statuses(state, contacts, leadership, self.round_plan, voting)
        self.gossip = classes.gossip(state, contacts, leadership, members, proposals, staging)
        self.inbound = classes.inbound(state, leadership, proposals, self.round_plan, voting, statuses)
