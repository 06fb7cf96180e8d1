"""Peers that lie, as code: what each wants to do to a run, and a run with some of them among honest peers.

`attack` says what a liar may choose, `contributions` has attacks on what goes into a round, `reducers` those on what
comes out of it, `talkers` those by messages beside the rounds, and `trial` lets them loose on the in-memory swarm with
the real trainer. `leaders` has those by who leads; they are let loose on simulated swarms (`sim_liars`).
"""
