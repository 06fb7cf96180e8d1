"""The network between simulated peers: who reaches whom, what is lost, doubled or late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spes_p2p.consensus.content import Envelope
from spes_p2p.ids import PeerId

if TYPE_CHECKING:
    from spes_p2p.testing.sim import World


class Network:
    """Carries messages by the weather of `world`, and the faults of links."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.groups: dict[PeerId, int] = {}
        self._cut_until: dict[tuple[PeerId, PeerId], float] = {}
        self._late: dict[PeerId, tuple[float, float]] = {}

    def partition(self, groups: dict[PeerId, int]) -> None:
        """From now on only peers with the same number reach each other; those not named have number 0."""
        self._world.changed(f"who reaches whom: {groups or 'all'}")
        self.groups = groups

    def heal(self) -> None:
        self._cut_until.clear()
        self._late.clear()
        self.partition({})

    def cut_links(self, links: Iterable[tuple[PeerId, PeerId]], seconds: float) -> None:
        """Messages from the first to the second of each pair are lost for a while; tiles still get through."""
        links = list(links)
        self._world.changed(f"no message gets through: {links}")
        self._cut_until.update((link, self._world.now + seconds) for link in links)
        self._world.after(seconds, self._world.changed, "links are mended")

    def delay_words_of(self, name: PeerId, late_seconds: float, seconds: float) -> None:
        """For a while all that this peer says comes late, by half of `late_seconds` to all of it."""
        self._world.changed(f"what {name} says comes up to {late_seconds} s late")
        self._late[name] = (self._world.now + seconds, late_seconds)
        self._world.after(seconds, self._world.changed, f"what {name} says comes in time again")

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        return self.groups.get(one, 0) == self.groups.get(other, 0)

    def delay(self) -> float:
        weather = self._world.weather
        return weather.shortest_delay + self._world.random.random() ** 3 * (
            weather.longest_delay - weather.shortest_delay
        )

    def send(self, sender: PeerId, to: PeerId, envelope: Envelope) -> None:
        """Delivers, loses, doubles or delays; order is not kept."""
        self._world.result.messages += 1
        weather = self._world.weather
        if self._cut_until and self._cut_until.get((sender, to), 0.0) > self._world.now:
            return
        if self._world.random.random() >= weather.loss:
            self._world.after(self.delay() + self._lateness(sender), self._deliver, sender, to, envelope)
        if weather.doubling and self._world.random.random() < weather.doubling:
            self._world.after(20 * self.delay(), self._deliver, sender, to, envelope)

    def _lateness(self, sender: PeerId) -> float:
        until, late_seconds = self._late.get(sender, (0.0, 0.0))
        return late_seconds * (0.5 + 0.5 * self._world.random.random()) if until > self._world.now else 0.0

    def _deliver(self, sender: PeerId, to: PeerId, envelope: Envelope) -> None:
        peer = self._world.peers.get(to)
        if peer is None or peer.core is None or not self.reaches(sender, to):
            return
        peer.receive(sender, envelope)
