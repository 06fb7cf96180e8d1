"""A peer's private training state beside a version of the state: whole on disk, or not there."""
