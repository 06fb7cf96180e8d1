"""The heart: how peers turn a round of training into one committed state. `round` decides, `driver` acts."""
