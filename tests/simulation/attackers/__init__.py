"""Peers that lie, as code: what each wants to do to a run, and a run with some of them among honest peers.

`attack` says what a liar may choose, `contributions` has attacks on what goes into a round, `leaders` those by who
leads or votes, `talkers` by messages beside the rounds. `trial` lets them loose on the in-memory swarm with the real
trainer; leaders on simulated swarms, too (`sim_liars`).
"""
