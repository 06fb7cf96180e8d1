"""Who votes is the organiser's to say: strangers train and count, and no number of them decides (real drivers)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import Roll, electors
from spes_p2p.errors import NetworkError
from spes_p2p.ids import PeerId
from spes_p2p.peer.organising import MOST_SIGNINGS, sign_roll, tell
from spes_p2p.swarm.records import PeerRecord, peers_key, words_key
from spes_p2p.sync.organiser_words import LOOK_SECONDS, TTL_SECONDS, WORDS_FILE, OrganiserWatch, Words, ending, roll
from spes_p2p.sync.passes import Doorkeeper, make_pass
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.simulation.pretend_peer import PretendWork
from tests.sync.around import Surroundings
from tests.sync.swarm_cases import in_swarm, small_config

VOUCHED = small_config("swarm.trusted=vouched", "swarm.min_peers=3")
FAST = PretendWork(step_seconds=0.1)


class Organising:
    """The organiser at its desk: what it says reaches everybody by the DHT."""

    def __init__(self, swarm: MemorySwarm) -> None:
        self._swarm, self._known = swarm, Words()
        self._sealer = KeySealer(swarm.network.keys.signer(PeerId(ORGANISER)))

    async def says(self, vouched: str = "", banned: str = "", forgotten: str = "") -> None:
        names = [[PeerId(name) for name in some] for some in (vouched, banned, forgotten)]
        self._known = roll(self._swarm.info, self._known, self._sealer, *names)
        directory = self._swarm.network.peer("the organiser's desk").directory
        await directory.publish(words_key(self._swarm.info.run_id), pack(self._known), TTL_SECONDS)


async def announce(swarm: MemorySwarm, name: str) -> None:
    """That this is a node of the run; for as long as a test may take."""
    record = PeerRecord(swarm.info.run_id, PeerId(name), (), "0.1.0", 0, 0, 0, 0.0, (), "bootstrap", False, 0)
    await swarm.network.peer(name).directory.publish(peers_key(swarm.info.run_id), pack(record), 3600.0)


def newest(swarm: MemorySwarm, name: str) -> Manifest:
    commit = swarm.peers[PeerId(name)].chain.newest
    assert commit is not None
    return commit.manifest


def voters(manifest: Manifest) -> str:
    return "".join(sorted(member.peer for member in electors(manifest.members)))


def names_of(manifest: Manifest) -> str:
    return "".join(sorted(member.peer for member in manifest.members))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(300.0):
        while not holds():
            await asyncio.sleep(0.1)


async def begun(swarm: MemorySwarm, around: Surroundings, desk: Organising, vouched: str) -> None:
    """A run of `a`, `b` and `c`, of whom some are vouched for before it begins."""
    await swarm.start_organiser()
    await around.add(ORGANISER)
    starts = [asyncio.create_task(swarm.add(name, FAST)) for name in "abc"]
    await until(lambda: any("somebody is here who may vote" in said for said in swarm.organiser_said))
    assert swarm.organiser.chain.length == 0
    await desk.says(vouched=vouched)
    await asyncio.gather(*starts)
    for name in "abc":
        await around.add(name)


def test_strangers_train_and_count_but_vote_only_once_they_are_vouched_for(tmp_path: Path) -> None:
    async def main(swarm: MemorySwarm) -> None:
        around, desk = Surroundings(swarm), Organising(swarm)
        await begun(swarm, around, desk, "ab")
        await swarm.until_round(3)
        chain = swarm.peers[PeerId("a")].chain
        manifests = [chain.commit(round).manifest for round in range(4)]
        assert [voters(manifest) for manifest in manifests] == ["ab"] * 4
        assert "c" in {entry.peer for manifest in manifests for entry in manifest.roster}
        await desk.says(vouched="c")
        await until(lambda: voters(newest(swarm, "a")) == "abc")
        await desk.says(banned="b")
        await until(lambda: names_of(newest(swarm, "a")) == names_of(newest(swarm, "c")) == "ac")
        stood = newest(swarm, "a").round
        await swarm.until_round(stood + 3, "ac")
        assert "b" not in names_of(newest(swarm, "a"))
        await desk.says(forgotten="b")
        await until(lambda: "b" in names_of(newest(swarm, "a")))
        assert "b" not in voters(newest(swarm, "a")), "a ban that is lifted gives no vote"
        await around.stop()

    in_swarm(tmp_path, main, VOUCHED)


def test_strangers_without_anybody_who_may_vote_commit_nothing(tmp_path: Path) -> None:
    """They outnumber those who vote, hear nobody else for long, and have no history of their own in the end."""

    async def main(swarm: MemorySwarm) -> None:
        around, desk = Surroundings(swarm), Organising(swarm)
        await begun(swarm, around, desk, "ab")
        strangers = ["c", "d", "e", "f"]
        for name in strangers[1:]:
            await swarm.add(name, FAST)
        await until(lambda: set(strangers) <= {member.peer for member in newest(swarm, "a").members})
        swarm.network.partition(strangers)
        stood = {name: newest(swarm, name).round for name in strangers}
        with_votes = newest(swarm, "a").round
        driver = swarm.peers[PeerId("c")].driver
        await asyncio.sleep(3 * driver.core.state.rules.renew_after_seconds)
        assert newest(swarm, "a").round > with_votes + 3
        assert all(newest(swarm, name).round <= stood[name] + 1 for name in strangers)
        swarm.network.heal()
        await swarm.until_round(newest(swarm, "a").round + 3)
        await around.stop()

    in_swarm(tmp_path, main, VOUCHED)


def test_when_all_who_vote_are_gone_the_organiser_waits_for_one_that_it_vouches_for(tmp_path: Path) -> None:
    async def main(swarm: MemorySwarm) -> None:
        around, desk = Surroundings(swarm), Organising(swarm)
        await begun(swarm, around, desk, "a")
        await swarm.until_round(2)
        await around.remove("a")
        await swarm.peers[PeerId("a")].kill()
        stood = newest(swarm, "b").round
        await until(lambda: any("the run can go on when" in said for said in swarm.organiser_said))
        assert newest(swarm, "b").round <= stood + 1
        await desk.says(vouched="b")
        await until(lambda: newest(swarm, "b").round > stood + 3)
        assert voters(newest(swarm, "b")) == "b"
        assert "c" in names_of(newest(swarm, "b"))
        await around.stop()

    in_swarm(tmp_path, main, VOUCHED)


def test_two_orders_that_are_given_in_one_moment_both_count(tmp_path: Path) -> None:
    """By two machines with the organiser's key: neither roll knows of the other, and both have the same number."""

    async def main(swarm: MemorySwarm) -> None:
        around, desk = Surroundings(swarm), Organising(swarm)
        await begun(swarm, around, desk, "ab")
        await swarm.until_round(1)
        sealer = KeySealer(swarm.network.keys.signer(PeerId(ORGANISER)))

        async def order(at: str, **names: list[PeerId]) -> Roll:
            return (await sign_roll(swarm.network.peer(at), swarm.info, sealer, **names))[0]

        said = await asyncio.gather(order("a desk", vouched=[PeerId("c")]), order("another", banned=[PeerId("x")]))
        last = max(said, key=lambda one: one.number)
        assert last.number <= 3, "each is signed again where it was lost, and not for ever on top of the other"
        assert (last.vouched, last.banned) == (("a", "b", "c"), ("x",))
        await until(lambda: newest(swarm, "a").roll == last)
        await around.stop()

    in_swarm(tmp_path, main, VOUCHED)


def test_two_orders_of_one_moment_that_contradict_each_other_come_to_an_end(tmp_path: Path) -> None:
    """Each is signed again where it was lost, but not for ever; what is in force was told so."""

    async def main(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        sealer, peer = KeySealer(swarm.network.keys.signer(PeerId(ORGANISER))), PeerId("x")
        desks = [swarm.network.peer(name) for name in ("a desk", "another")]
        watch = OrganiserWatch(
            swarm.info, swarm.network.peer("node").directory, swarm.network.keys.verify, lambda words: None,
            swarm.server_failures.append, tmp_path / WORDS_FILE,
        )  # fmt: skip
        await announce(swarm, "node")
        await watch.start()
        said = await asyncio.gather(
            sign_roll(desks[0], swarm.info, sealer, vouched=[peer]),
            sign_roll(desks[1], swarm.info, sealer, banned=[peer]),
            return_exceptions=True,
        )
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert watch.known.roll is not None
        last = watch.known.roll.value
        assert last.number <= 2 * MOST_SIGNINGS
        told = [one[0] for one in said if not isinstance(one, BaseException)]
        assert not told or last in told
        assert len(told) + sum(isinstance(one, NetworkError) for one in said) == 2
        assert all(word in (("x",), ()) for word in (last.vouched, last.banned))
        assert last.vouched != last.banned
        await watch.stop()

    in_swarm(tmp_path, main, VOUCHED)


def test_an_order_is_confirmed_by_nodes_of_the_run_alone(tmp_path: Path) -> None:
    """A command that is repeated, since nobody confirmed it, finds what it published itself the first time."""

    async def main(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        sealer = KeySealer(swarm.network.keys.signer(PeerId(ORGANISER)))
        for desk in ("a desk", "the same, again"):
            with pytest.raises(NetworkError, match="no node of the run has confirmed it"):
                await tell(swarm.network.peer(desk), swarm.info, ending(swarm.info, 7, sealer))

    in_swarm(tmp_path, main, VOUCHED)


def test_who_brings_a_pass_takes_no_order_back_that_its_node_has_not_heard_yet(tmp_path: Path) -> None:
    """Nodes look for orders now and then: a ban of this moment is in the DHT, and the roll that they know is older."""

    async def main(swarm: MemorySwarm) -> None:
        info, check = swarm.info, swarm.network.keys.verify
        net = swarm.network.peer(ORGANISER)
        sealer = KeySealer(net.signer)
        watch = OrganiserWatch(
            info, net.directory, check, lambda words: None, swarm.server_failures.append, tmp_path / WORDS_FILE
        )
        await Organising(swarm).says(banned="x")
        keeper = Doorkeeper(info, check, sealer, tmp_path / "passes", lambda peer, missing: None, print)
        await keeper.admit(watch, {PeerId("d"): make_pass(info.fingerprint, PeerId("d"), sealer, 1)})
        assert watch.known.roll is not None
        assert (watch.known.roll.value.vouched, watch.known.roll.value.banned) == (("d",), ("x",))
        await swarm.start_organiser()

    in_swarm(tmp_path, main, VOUCHED)


def test_who_brings_a_pass_takes_no_order_back_that_is_given_in_the_moment_after(tmp_path: Path) -> None:
    """A roll that is signed and not told yet takes the place of one that others confirm meanwhile."""

    async def main(swarm: MemorySwarm) -> None:
        await swarm.start_organiser()
        info, check, desk = swarm.info, swarm.network.keys.verify, swarm.network.peer("a desk")
        sealer = KeySealer(swarm.network.keys.signer(PeerId(ORGANISER)))
        node, other = (
            OrganiserWatch(
                info, swarm.network.peer(name).directory, check, lambda words: None, swarm.server_failures.append,
                tmp_path / name,
            )
            for name in ("node", "other")
        )  # fmt: skip
        keeper = Doorkeeper(info, check, sealer, tmp_path / "passes", lambda peer, missing: None, print)
        for name, watch in (("node", node), ("other", other)):
            await announce(swarm, name)
            await watch.start()
            await asyncio.sleep(LOOK_SECONDS / 2)
        await asyncio.sleep(LOOK_SECONDS / 4)  # the other looks first after each pass
        for peer, banned in ((PeerId(f"d{number}"), PeerId(f"x{number}")) for number in range(4)):
            await keeper.admit(node, {peer: make_pass(info.fingerprint, peer, sealer, 1)})
            began = asyncio.get_running_loop().time()
            await sign_roll(desk, info, sealer, banned=[banned])
            await asyncio.sleep(began + 3 * LOOK_SECONDS - asyncio.get_running_loop().time())
            assert other.known.is_banned(banned)
        await node.stop()
        await other.stop()

    in_swarm(tmp_path, main, VOUCHED)
