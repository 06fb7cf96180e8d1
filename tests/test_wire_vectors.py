"""docs/wire_vectors.json says what the code sends, and the code reads what it says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p.codecs.lossy import decode
from spes_p2p.codecs.sizes import CODECS, Codec
from spes_p2p.ids import sha256
from spes_p2p.wire import unpack
from tests import lossy_oracle

ROOT = Path(__file__).parents[1]
MAKER = runpy.run_path(str(ROOT / "scripts" / "make_wire_vectors.py"))
VECTORS: dict[str, Any] = json.loads((ROOT / "docs" / "wire_vectors.json").read_text())


def test_the_file_is_what_the_code_makes() -> None:
    assert MAKER["vectors"]() == VECTORS, "the wire format changed: another WIRE_VERSION, and make_wire_vectors.py"


@pytest.mark.parametrize("name", VECTORS["messages"])
def test_a_message_is_read_back(name: str) -> None:
    value = MAKER["examples"]()[name]
    assert unpack(type(value), bytes.fromhex(VECTORS["messages"][name]["packed"])) == value


@pytest.mark.parametrize("codec", CODECS[1:])
def test_what_arrives_is_what_the_independent_codecs_say(codec: Codec) -> None:
    values, vector = MAKER["change"](), VECTORS["codecs"][codec]
    arrived = decode(codec, bytes.fromhex(vector["data"]), len(values))
    assert sha256(arrived.tobytes()).hex() == vector["arrives_sha256"]
    np.testing.assert_array_equal(arrived, lossy_oracle.THROUGH[codec](values))
