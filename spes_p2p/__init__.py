"""spes-p2p: pretrain a Mixture-of-Experts language model on machines without a fast network, and without any server."""

__version__ = "0.1.0"
