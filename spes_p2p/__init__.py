"""spes-p2p: pretrain a Mixture-of-Experts language model on machines without a fast network, and without any server.

Each peer trains the shared weights and a few of the experts; every round the peers average what they trained, vote on
the result, and go on from the same bits. The program is `spes-p2p` (`cli`). From code, start here:

    config.load.load_config           a run, from YAML and dotted overrides
    peer.run.run_peer                 one peer of a run, from its options to its end
    peer.bootstrap.run_bootstrap      the organiser's node
    testing.processes.LocalSwarm      a swarm of real processes on this machine
    state.store.StateStore            the committed state on disk; read_only=True beside a running peer

Layers, and what belongs where: docs/architecture.md. Nothing heavy is imported here.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
