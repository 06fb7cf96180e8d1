"""The ledger of a run: what its manifests have counted of each peer, from genesis up to one of them. Pure.

No manifest holds it: each names its root, by the Merkle tree of RFC 9162 over the packed accounts. Who has the ledger
of the parent derives that of a child, and the other way round, so leaders and electors come to the same root, and a
chain gives it again. A path of that tree with the manifest's certificate shows anybody one account.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from spes_p2p.consensus.manifest import Audited, Contribution, Manifest
from spes_p2p.consensus.membership import FAILED, PASSED, WITHHELD
from spes_p2p.data.merkle import EMPTY_ROOT, leaf_hash, parents, proof_length, root_by, siblings
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import HASH_BYTES, Hash, PeerId, sha256
from spes_p2p.wire import pack

MAX_ACCOUNTS = 2**15
"""Keys cost nothing: who comes when there are so many has no account, however much of it is counted."""


@dataclass(frozen=True, order=True)
class Account:
    """What was counted of one peer: in how many rounds, tokens, and inner steps; and what audits of it have found.

    `withheld`: audits to which it showed nothing.
    """

    peer: PeerId
    rounds: int = 0
    tokens: int = 0
    steps: int = 0
    passed: int = 0
    failed: int = 0
    withheld: int = 0

    def plus(self, entry: Contribution, sign: int) -> Account:
        return replace(
            self,
            rounds=self.rounds + sign,
            tokens=self.tokens + sign * entry.tokens,
            steps=self.steps + sign * entry.steps,
        )

    def audited(self, finding: str, sign: int) -> Account:
        return replace(
            self,
            passed=self.passed + sign * (finding == PASSED),
            failed=self.failed + sign * (finding == FAILED),
            withheld=self.withheld + sign * (finding == WITHHELD),
        )

    @cached_property
    def leaf(self) -> bytes:
        return leaf_hash(pack(self))


@dataclass(frozen=True)
class Proof:
    """Where an account stands in a ledger of so many, and the hashes that lead from it to the root."""

    index: int
    accounts: int
    path: tuple[Hash, ...]


@dataclass(frozen=True)
class Ledger:
    """The accounts of all peers of which anything was counted, sorted by peer."""

    accounts: tuple[Account, ...] = ()

    def after(self, roster: Sequence[Contribution], audited: Sequence[Audited] = ()) -> Ledger:
        """With what one more manifest counts, and lists of audits: of work that is counted already."""
        found = {account.peer: account for account in self.accounts}
        for entry in roster:
            if entry.peer in found or len(found) < MAX_ACCOUNTS:
                found[entry.peer] = found.get(entry.peer, Account(entry.peer)).plus(entry, 1)
        _note(found, audited, 1)
        return Ledger(tuple(found[peer] for peer in sorted(found)))

    def before(self, roster: Sequence[Contribution], audited: Sequence[Audited] = ()) -> Ledger:
        """Without what the newest manifest has counted: the inverse of `after`."""
        found = {account.peer: account for account in self.accounts}
        _note(found, audited, -1)
        for entry in roster:
            if entry.peer in found:
                found[entry.peer] = found[entry.peer].plus(entry, -1)
        return Ledger(tuple(account for account in found.values() if account.rounds))

    def of(self, peer: PeerId) -> Account:
        """Its account; one of nothing where it has none."""
        at = self._place(peer)
        return Account(peer) if at is None else self.accounts[at]

    def _place(self, peer: PeerId) -> int | None:
        at = bisect_left(self.accounts, peer, key=lambda account: account.peer)
        return at if at < len(self.accounts) and self.accounts[at].peer == peer else None

    @cached_property
    def root(self) -> Hash:
        *_, top = self._levels()
        return _root(len(self.accounts), top)

    def _levels(self) -> Iterator[bytes]:
        """The joined hashes of each level of the tree, from the leaves up."""
        level = b"".join(account.leaf for account in self.accounts) or EMPTY_ROOT
        yield level
        while len(level) > HASH_BYTES:
            level = parents(level)
            yield level

    def proof_of(self, peer: PeerId) -> Proof | None:
        """None where it has no account."""
        at, levels = self._place(peer), list(self._levels())
        if at is None:
            return None
        places = siblings(at, len(self.accounts))
        path = (levels[level][place * HASH_BYTES : (place + 1) * HASH_BYTES] for level, place in places)
        return Proof(at, len(self.accounts), tuple(map(Hash, path)))


def _note(accounts: dict[PeerId, Account], audited: Sequence[Audited], sign: int) -> None:
    for one in audited:
        if one.peer in accounts:
            accounts[one.peer] = accounts[one.peer].audited(one.finding, sign)


def _root(accounts: int, top: bytes) -> Hash:
    """With the number of accounts: else two places could have one path."""
    return sha256(pack((accounts, top)))


EMPTY = Ledger()


def check_account(account: Account, proof: Proof, root: Hash) -> None:
    """Raises RemoteProtocolError unless `account` is one of the ledger with this root."""
    fits = 0 <= proof.index < proof.accounts <= MAX_ACCOUNTS
    fits = fits and len(proof.path) == proof_length(proof.index, proof.accounts)
    top = root_by(proof.index, proof.accounts, account.leaf, proof.path) if fits else b""
    if _root(proof.accounts, top) != root:
        raise RemoteProtocolError(f"the account of {account.peer[:64]} is not in the ledger that the manifest names")


def check_ledger(before: Ledger, child: Manifest) -> Ledger:
    """The ledger up to `child`; `before`: its parent's. Raises RemoteProtocolError where `child` names another one."""
    after = before.after(child.roster, child.audited)
    if after.root != child.ledger:
        raise RemoteProtocolError(f"manifest of round {child.round}: its ledger does not follow from its parent's")
    return after
