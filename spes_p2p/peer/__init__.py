"""The composition root: builds one peer, or one bootstrap node, from all the parts, and runs it.

options     what a person chooses for this machine
connection  the network thread, the run found over it, and the driver: everything that is not training
training    the loop over rounds: adopt, train, hand in, wait
resume      saved training state, out and in
run         `run_peer`: puts them together
bootstrap   `run_bootstrap`: the organiser's node
"""
