"""hivemind's private names that we use: each is still there and does what we need of it.

Who raises the bound on hivemind's version in pyproject.toml begins here.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Coroutine, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgpack
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from packaging.requirements import Requirement

from spes_p2p.swarm import hivemind_backend
from spes_p2p.swarm.hivemind_backend.dial import parse_address

USED = {
    "_child",
    "_client",
    "_ext_types",
    "_pending_calls",
    "_read_task",
    "_terminate",
    "_UNIX_SOCKET_PREFIX",
    "_validate_dictionary",
}
HERE = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "use_relay": False, "dht_mode": "client"}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Those that are asked of something else than `self`, and those that a class takes over from another one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            yield node.attr
        elif isinstance(node, ast.ClassDef) and node.bases:
            assigned = [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
            yield from (target.id for target in assigned if isinstance(target, ast.Name))


def test_no_other_private_name_is_used() -> None:
    assert hivemind_backend.__file__ is not None
    sources = Path(hivemind_backend.__file__).parent.glob("*.py")
    found = {name for path in sources for name in private_names(ast.parse(path.read_text()))}
    assert {name for name in found if name.startswith("_") and not name.startswith("__")} == USED


def test_a_dictionary_of_records_is_packed_under_the_code_that_is_asked_for() -> None:
    packed = msgpack.unpackb(MSGPackSerializer.dumps(DictionaryDHTValue()))
    assert packed.code == MSGPackSerializer._ext_types[DictionaryDHTValue]


def test_the_next_minor_version_is_not_taken_unseen() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    bound = next(one for one in map(Requirement, pyproject["project"]["dependencies"]) if one.name == "hivemind")
    installed = version("hivemind")
    assert bound.specifier.contains(installed)
    major, minor, *_ = installed.split(".")
    assert not bound.specifier.contains(f"{major}.{int(minor) + 1}.0")


def test_a_node_asks_for_a_whole_dictionary_by_key_and_records() -> None:
    assert list(inspect.signature(DHTProtocol._validate_dictionary).parameters) == ["self", "key_bytes", "dictionary"]


def test_the_reader_looks_for_a_call_before_it_answers_it() -> None:
    """`_PendingCalls` hides a call that was given up from `in`, and from nothing else."""
    source = inspect.getsource(ControlClient)
    answers = source.count("self._pending_calls[call_id].set_")
    assert answers == source.count("if call_id in self._pending_calls") > 0


def test_a_node_that_is_pinged_before_it_is_whole_gives_no_id() -> None:
    protocol = DHTProtocol(_initialized_with_create=True)
    context = P2PContext(handle_name="ping", local_id=PeerID(b"us"), remote_id=PeerID(b"them"))
    answer = asyncio.run(protocol.rpc_ping(dht_pb2.PingRequest(), context))
    assert not answer.peer.node_id


class Echo(ServicerBase):
    async def rpc_echo(self, request: BytesValue, context: P2PContext) -> BytesValue:
        return request


Body = Callable[[P2P, P2P], Coroutine[Any, Any, None]]


def with_two(body: Body) -> None:
    """Runs `body` with two daemons of hivemind's own, that do not know each other."""

    async def main() -> None:
        async with asyncio.timeout(60):
            one, other = await P2P.create(**HERE), await P2P.create(**HERE)
            try:
                await body(one, other)
            finally:
                await one.shutdown()
                await other.shutdown()

    asyncio.run(main())


@pytest.mark.swarm
def test_a_daemon_connects_where_it_is_told_and_answers_calls() -> None:
    async def body(one: P2P, other: P2P) -> None:
        await Echo().add_p2p_handlers(other)
        addresses = [parse_address(str(maddr)).maddr for maddr in await other.get_visible_maddrs()]
        await one._client.connect(other.peer_id, addresses)
        assert [info.peer_id for info in await one.list_peers()] == [other.peer_id]
        pending = one._client.control._pending_calls
        assert type(pending) is dict
        call = asyncio.ensure_future(Echo.get_stub(one, other.peer_id).rpc_echo(BytesValue(value=b"x")))
        while not pending and not call.done():
            await asyncio.sleep(0)
        assert all(isinstance(answer, asyncio.Future) for answer in pending.values())
        assert (await call).value == b"x"

    with_two(body)


@pytest.mark.swarm
def test_who_watches_a_daemon_learns_of_its_end() -> None:
    async def body(one: P2P, other: P2P) -> None:
        reading = one._client.control._read_task
        assert one._child.returncode is None
        one._child.send_signal(signal.SIGKILL)
        assert await one._child.wait() == -signal.SIGKILL
        await asyncio.wait((reading,))
        other._terminate()
        assert await other._child.wait() is not None
        assert P2P._UNIX_SOCKET_PREFIX.startswith("/unix/")

    with_two(body)


def test_who_only_looks_at_a_run_loads_little_and_the_rest_of_hivemind_is_there_all_the_same() -> None:
    asked = (
        "import sys, spes_p2p.peer.network, spes_p2p.sync.report\n"
        "print(sorted({'torch', 'numpy', 'scipy', 'dns', 'hivemind.averaging'} & set(sys.modules)))\n"
        "import hivemind\n"
        "from hivemind.utils import MPFuture, get_logger\n"
        "print(hivemind.__version__, hivemind.DHT.__module__, MPFuture.__module__, get_logger.__module__)"
    )
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    places = "hivemind.dht.dht hivemind.utils.mpfuture hivemind.utils.logging"
    assert said.splitlines() == ["[]", f"{version('hivemind')} {places}"]
