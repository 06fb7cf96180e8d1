"""Who should own which expert column. Pure functions; needs no torch."""
