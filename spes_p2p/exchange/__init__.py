"""Bytes by hash from whoever has them, whom to ask and how long to wait; what is asked for and how it is answered."""
