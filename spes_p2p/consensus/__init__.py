"""The protocol itself, pure: what a peer decides. No tensor, no socket, no clock, no disk."""
