"""A local web page that shows a run: what is read from the swarm, the history that is kept of it, and the server."""
