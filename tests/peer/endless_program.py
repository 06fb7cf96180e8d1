"""Stands for an evaluation that never ends: it has something in the temporary folder, and waits."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").touch()
        threading.Event().wait()
