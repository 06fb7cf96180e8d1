"""A bootstrap node that nobody can dial says so at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from spes_p2p.errors import NetworkError
from spes_p2p.peer.entrance import check_dialable


def test_a_node_that_others_could_not_dial_is_refused_with_the_fix() -> None:
    with pytest.raises(NetworkError, match="nobody can dial this machine") as raised:
        check_dialable(cast(Any, SimpleNamespace(client_mode=True)))
    assert "--announce-maddrs" in raised.value.fix


def test_a_node_that_can_be_dialled_goes_on() -> None:
    check_dialable(cast(Any, SimpleNamespace(client_mode=False)))
