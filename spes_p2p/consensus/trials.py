"""Columns that too few contributed to for anybody to compare them are tried on held-out text before they are voted for.

What one owner hands out of its column alone is what it says. So each peer that has a model looks for itself whether
the committed one gets worse by it. A column that it finds harmful goes into no state that it builds, and it prevotes
for no first proposal with it, but keeps to what was locked, and takes any once everybody has led: it is an
opinion, and never part of a manifest, since two processors may find another loss. The column keeps its committed values
for the round.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spes_p2p.consensus.actions import Try
from spes_p2p.consensus.audits import Audits
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.manifest import Slice
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.slices import Column, columns_of_few
from spes_p2p.ids import Hash


class Trials(Part):
    """What was tried, and what came of it."""

    def are_pending(self, slices: Iterable[tuple[Slice, bytes]]) -> bool:
        """Whether columns among these staged slices are to be tried yet, all at once: begins that where it is."""
        current = self._state.round
        if not self._state.rules.trial_sequences or current.decided is not None:
            return False
        if not current.trying:
            current.trying = tuple(column for column in columns_of_few(slices) if column.name not in current.tried)
            if current.trying:
                self._state.out.append(Try(current.trying))
        return bool(current.trying)

    def tried(self, columns: tuple[Column, ...], harmful: tuple[Hash, ...], now: float) -> None:
        """How it went."""
        current = self._state.round
        if current.trying != columns:
            return
        current.trying = ()
        for column in columns:
            current.tried.add(column.name)
            if column.name in harmful:
                current.harmful.add(column.name)
                self._tell_people(column)
        self._state.note_progress(now)

    def _tell_people(self, column: Column) -> None:
        text = f"with its values expert column {column.block - 1} would make the model worse on held-out text"
        for peer in column.contributors:
            self._state.notify("left out", text, peer)

    def harmful_blocks(self, slices: Iterable[tuple[Slice, bytes]]) -> frozenset[int]:
        """The blocks of harmful columns among slices."""
        return frozenset(column.block for column in columns_of_few(slices) if self._is_harmful(column))

    def has_harmful(self, content: Content) -> bool:
        """Whether a state has a harmful column."""
        if not self._state.round.harmful:
            return False
        slices = zip(content.manifest.slices, content.wire_hashes, strict=True)
        return any(self._is_harmful(column) for column in columns_of_few(slices))

    def _is_harmful(self, column: Column) -> bool:
        return column.name in self._state.round.harmful


class Checks(NamedTuple):
    """What is looked at before this peer builds a state, or votes for one: reductions made again, and columns tried."""

    audits: Audits
    trials: Trials

    def are_pending(self, slices: Iterable[tuple[Slice, bytes]]) -> bool:
        """Whether these slices, given with the hashes of their tiles and all staged, are still to be looked at."""
        return self.audits.is_pending() or self.trials.are_pending(slices)
