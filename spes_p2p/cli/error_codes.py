"""The code of each error that users see, such as E137: docs/troubleshooting.md lists them.

`error_codes.json` says which text has which code. `scripts/make_error_docs.py` keeps it: no code is given twice, and an
error keeps its own when its words change.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

CODES = Path(__file__).with_suffix(".json")
HOLE = "<>"
"""Stands in the texts of the file for what is filled in when an error is raised."""


def code_of(message: str) -> str | None:
    """The code of the error that says this; of several whose texts fit, the one with the most words of its own."""
    said = " ".join(message.split())
    fitting = [
        (len(text), code)
        for code, text in json.loads(CODES.read_text()).items()
        if re.fullmatch(".*".join(map(re.escape, text.split(HOLE))), said)
    ]
    return max(fitting)[1] if fitting else None
