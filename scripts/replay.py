"""Plays flight recordings of a peer again and prints what it decided, round by round.

    python scripts/replay.py OUTPUT/flight/flight-before.recording OUTPUT/flight/flight.recording [--events]

Exits with 1 where the state machine of this version decides something else than the recorded one did.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed

from spes_p2p.config.load import published_config
from spes_p2p.consensus.actions import Notice
from spes_p2p.errors import SpesError
from spes_p2p.ids import short
from spes_p2p.interop.hf import state_layout
from spes_p2p.sync.node import rules_of
from spes_p2p.sync.recorder import ReplayedEvent, load_recording, replay


def play(path: Path, events: bool) -> bool:
    """Prints one recording; whether everything was decided as it was then."""
    recording = load_recording(path)
    config = published_config(recording.info.config, origin="the recorded config")
    layout = state_layout(config)
    print(f"{path}: peer {short(recording.me)} of run {recording.info.run_id}, {len(recording.frames)} events")
    steps: list[ReplayedEvent] = []
    different = 0
    for step in replay(recording, rules_of(config, recording.info, layout)):
        if steps and step.round != steps[0].round:
            print_round(steps)
            steps = []
        steps.append(step)
        if events:
            print(
                f"  {type(step.frame.event).__name__}: rules {step.rules}, {[type(a).__name__ for a in step.actions]}"
            )
        if not step.same:
            different += 1
            print(
                f"  DIFFERENT in {type(step.frame.event).__name__}: rules {step.rules} now, {len(step.actions)} actions"
            )
    if steps:
        print_round(steps)
    print(f"{different} of {len(recording.frames)} decisions differ" if different else "all was decided as it was then")
    return not different


def print_round(steps: list[ReplayedEvent]) -> None:
    """What happened on top of one committed state."""
    rules = Counter(rule for step in steps for rule in step.rules)
    actions = Counter(type(action).__name__ for step in steps for action in step.actions)
    print(f"on round {steps[0].round}: {len(steps)} events; rules {dict(rules)}; actions {dict(actions)}")
    for notice in (action for step in steps for action in step.actions if isinstance(action, Notice)):
        print(f"  {notice.kind}: {notice.text}" + (f" ({short(notice.peer)})" if notice.peer else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description="Play flight recordings again.")
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--events", action="store_true", help="one line for each event")
    options = parser.parse_args()
    try:
        same = [play(path, options.events) for path in options.recordings]
    except (SpesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
