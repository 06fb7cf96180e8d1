"""How a peer takes its leave: what it trained is handed in, what only it has is handed over, and nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.observe.events import Warning
from spes_p2p.observe.metrics import count_text
from spes_p2p.peer.connection import LEAVE_SECONDS, LINGER_SECONDS, Connection
from spes_p2p.peer.kept_invite import DEFAULT_FOLDER
from spes_p2p.peer.presence import Progress
from spes_p2p.peer.training import TrainingLoop
from spes_p2p.sync.surroundings import Applied
from spes_p2p.train.commits import news_of
from spes_p2p.train.stages import Depart, Leave, Stage

LOOK_SECONDS = 0.2


class Departure:
    """The end of a training loop, whose thread it runs in; `run` follows that of the loop."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._machine = loop.machine
        self._gate = loop.gate
        self._connection = loop.connection

    def run(self) -> None:
        """Leaves the run; if the run is over, first serves the others until they have its last round."""
        if not self._loop.limits.is_over():
            self._leave()
            return
        # A run that is over is kept, however seldom checkpoints are saved
        turn = self._machine.turn
        if turn is not None and self._connection.last_round is not None:
            self._loop.save(turn.manifest, self._loop.values.base, self._machine.own.uncounted, final=True)
        if self._do_others_go_on():
            self._leave()

    def _do_others_go_on(self) -> bool:
        """Serves the others until they have the last round, too; a heartbeat tells the bootstrap node.

        Returns True as soon as one of them trains on: the round was then last only for us, and we leave as usual.
        """
        now, end = time.monotonic(), self._machine.newest
        told, until = now + 2 * self._loop.config.swarm.heartbeat_seconds, now + LINGER_SECONDS
        while time.monotonic() < until and not self._gate.stopping:
            others = self._connection.others()
            ended = self._connection.last_round == end
            if not ended and any(o.round > end or (o.round == end and o.work.expected_tokens) for o in others):
                return True
            if time.monotonic() > told and all(other.round >= end for other in others):
                break
            self._gate.wait(time.monotonic() + LOOK_SECONDS)
        return False

    def _leave(self) -> None:
        """Hands in what was trained, and goes when a manifest without us is committed, or after a while.

        Where nobody else is there, nothing is handed in: a later life goes on from this very step.
        """
        loop, machine = self._loop, self._machine
        until = (self._gate.stopped_at if self._gate.stopping else time.monotonic()) + LEAVE_SECONDS
        if machine.own.lead.tokens:  # it is handed in on top of the round that is being synced
            self._take_next(time.monotonic() + LEAVE_SECONDS / 2)
        turn = machine.turn
        if turn is None or not self._connection.is_member():
            return
        is_alone = machine.stage is Stage.TRAINING and not self._connection.others()
        if is_alone or (not machine.own.uncounted.tokens and not self._is_missed(turn.manifest)):
            loop.save(turn.manifest, loop.values.base, machine.own.uncounted, final=True)
            return
        self._hand_in(until)
        self._connection.wishes.leave()
        while machine.stage is Stage.LEAVING and time.monotonic() < until:
            news = self._gate.wait(until, heed_stop=False)
            if news:
                self._follow(news, until)

    def _take_next(self, until: float) -> None:
        """Goes on from the round that is being synced, if it comes in time."""
        news = self._gate.wait(until, heed_stop=False)
        if news:
            self._loop.take(news)
        else:
            tokens = self._machine.own.lead.tokens
            text = f"{tokens:,} tokens of yours do not count: the round before them was not synced in time"
            self._loop.emit(Warning(text))

    def _hand_in(self, until: float) -> None:
        if self._machine.stage is Stage.TRAINING:
            self._loop.train_one_step(until)
            self._loop.step_log.flush()
            self._loop.hand_in()
        self._machine.handle(Leave())

    def _follow(self, events: tuple[Applied, ...], until: float) -> None:
        """Rounds were committed since this peer said that it leaves."""
        newest = events[-1].commit.manifest
        counts_on_us = not self._nobody_counts_on_us(newest)
        actions = self._machine.handle(news_of(self._machine, events, self._connection.disk.chain, counts_on_us))
        if self._machine.stage is Stage.OUTSIDE:  # another history won, and it does not name us
            self._loop.do(actions, events)
            return
        if self._machine.stage is Stage.TRAINING:  # the round left something out, or had begun without our wish
            self._loop.do(actions, events)
            self._hand_in(until)
            return
        self._loop.dump_round(events[0])
        self._loop.do([action for action in actions if not isinstance(action, Depart)], events)
        for action in actions:
            if isinstance(action, Depart):
                self._depart(action, until)

    def _depart(self, action: Depart, until: float) -> None:
        """Saves what a restart continues from: the state that we leave behind, and moments of the same age.

        If columns are handed out in turns (`sync.expert_rounds`), also saves how far ours are ahead of the committed
        state, since nobody has taken them over if nobody stays. Values include work that is saved as uncounted.
        """
        loop, newest = self._loop, action.newest
        values = loop.values.masters(newest) if action.rebase is None else loop.values.rebased(newest, action.rebase)
        loop.trainer.adopt(action.owned, values, newest.step)
        loop.save(newest, self._connection.disk.store.version(newest.round), self._machine.own.uncounted, final=True)
        while time.monotonic() < until and self._connection.are_others_behind(newest.round):
            self._gate.wait(time.monotonic() + LOOK_SECONDS, heed_stop=False)  # the others get it from who has it

    def _is_missed(self, newest: Manifest) -> bool:
        """Whether a member of the run, or somebody who will be one, is there to hear that this peer goes."""
        members = {member.peer for member in newest.members}
        return any(status.peer in members or not status.intent.leaving for status in self._connection.others())

    def _nobody_counts_on_us(self, newest: Manifest) -> bool:
        """Whether the manifest no longer names us, or names only leavers: the last ones are never dropped from it."""
        members, me = {member.peer for member in newest.members}, self._connection.peer_id
        leaving = {status.peer for status in self._connection.others() if status.intent.leaving}
        return me not in members or members <= leaving | {me}


def last_words(connection: Connection, folder: Path, kept: int) -> str:
    """A peer's last line: what became of what it trained, and where it is kept. `kept`: tokens that a later life of it
    hands in."""
    last, tip = connection.last_round, connection.driver.core.tip.round
    counted = _of_tokens(connection.presence.progress, kept)
    what = f"{counted} Everything is kept in the folder {folder};"
    if last is not None and tip >= last:
        model = f"spes-p2p export --checkpoint {folder} --output MODEL"
        return f"The run is over. {what} get its model with: {model}"
    where = "" if folder == DEFAULT_FOLDER else f" --output {folder}"
    return f"You have left. {what} go on with: spes-p2p join{where}"


def _of_tokens(progress: Progress, kept: int) -> str:
    trained = progress.tokens
    counted = max(0, min(trained, progress.counted_tokens))
    if not trained:
        return "Nothing was trained since this start."
    if counted == trained:
        return f"{count_text(trained)} tokens trained here, all counted."
    rest = "; the rest is handed in when you come back" if 0 < trained - counted <= kept else ""
    return f"{count_text(trained)} tokens trained here, {count_text(counted)} of them counted{rest}."
