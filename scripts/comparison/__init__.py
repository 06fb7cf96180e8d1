"""Methods side by side: arms, what came out of each, and the page that says it. `scripts/compare.py` runs it.

Nothing in here decides what an arm learns, but for the config that it makes: results are kept where only this changed.
"""
