"""How the peers of a run agree on what each round of training has made of the model. Pure.

The peers of a run hold one *state* (the model's values), cut into tiles and known by hashes. A *round* makes the next
one. Each peer trains on its own for a while; the *leader* of the round closes it and sends a *plan*: whose work
counts (the *roster*), and which peer averages which *slice* of the values. Reducers report the hashes of what they
made, everybody fetches it, and the leader builds the new state and *proposes* a *manifest*: content only, it names
the parent manifest, the roster, the hash of the new state, and who is a member next. The *electors* (members that the
parent names as such) compute the same state and vote for the manifest once it is on their disks, by Tendermint. Signed
precommits of a quorum are a *certificate*: a manifest with one is *committed*, and manifests form a chain. Where a
quorum is lost, those who are left wait for it, or for a *renewal*: the organiser's node names other electors, and
nothing else changes (`renewing`). A peer stands on the history that has counted most (`place`).

No tensor, socket, disk or clock is here, and nothing moves a byte. `Consensus.handle(event, now)` takes what happened
and returns what is to be done; whoever drives it carries that out in order and tells how it went, as further events.

What to read, in this order:

- `events`, `actions`: all that goes in and comes out. `messages`: what peers say to each other.
- `machine`: the entry, who takes an event, and the loop that tries the rules. `table`: the rules, in their order.
- `state`: all that a peer knows, as plain dataclasses. `parts`: the parts over it, and how they are put together.
- The parts. Whom it hears: `contacts`, `members`. What it takes in and says: `statuses`, `inbound`, `gossip`. A
  round: `round_plan` (close and plan), `reducing` (average, build), `staging` (what must come to the disk),
  `proposals`. The vote in a round: `voting`, `leadership`. Without a quorum: `quorum`, `renewing`. Between rounds:
  `lifecycle`, `following`.
- Tendermint, which knows nothing of rounds or tiles: `tendermint`, with what one elector says, over what it knows
  (`vote`, `heard_votes`) and may never take back (`vote_record`); its events and actions in `vote_events`, who votes in
  `electorate`.
- Pure functions: `rules` (what a child manifest must be), `child_checks`, `certificate`, `membership`, `slices`,
  `turns`, `place`, `bounds`. Measured time: `timing`, `liveness`.
"""
