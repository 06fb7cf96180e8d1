"""spes-p2p: pretrain a Mixture-of-Experts language model on machines without a fast network, and without any server.

Each peer trains the shared weights and a few of the experts; every round the peers average what they trained, vote on
the result, and go on from the same bits. The program is `spes-p2p` (`cli`). From code, `Run`, `Peer`, `Swarm` and
`evaluate` do what it does (`api`, docs/api.md). Below them:

    config.load.load_config           a run, from YAML and dotted overrides
    peer.run.run_peer                 one peer of a run, from its options to its end
    peer.bootstrap.run_bootstrap      the organiser's node
    quickstart.processes.LocalSwarm   a swarm of real processes on this machine
    state.store.StateStore            the committed state on disk; read_only=True beside a running peer

Layers, and what belongs where: docs/architecture.md. Nothing heavy is imported here.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Peer", "Run", "Swarm", "__version__", "evaluate"]

__version__ = "0.1.0"
_LAZY = frozenset({"Peer", "Run", "Swarm", "evaluate"})


def __getattr__(name: str) -> Any:
    """The names of `api`, which imports torch and the network, on first use."""
    if name in _LAZY:
        return getattr(importlib.import_module("spes_p2p.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
