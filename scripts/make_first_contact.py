#!/usr/bin/env python3
"""Writes docs/first-contact.md: what two people type, and see, from `git clone` to a swarm on their two machines.

    python scripts/make_first_contact.py            # root, iproute2, a few minutes; clones this repository

The machines are network namespaces of this one, with an address, a clone, a .venv and a home folder of their own each.
The namespaces have no way out, so that what a command installs is installed before it, from outside; its words and its
time are counted to that command. Nothing of the page is written by hand but the words around it. In what was printed
the folders of this machine, the repository, the invitation, peer ids and the kernel are written shorter.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from spes_p2p.quickstart.processes import Host  # noqa: E402
from tests.swarm.namespaces import Lab, may_make_namespaces  # noqa: E402

PROGRAM = "spes-p2p/scripts/spes-p2p.sh"
LATE_SECONDS = 900.0
LEAVE_SECONDS = 30.0
SHOWN_STEPS = 2
"""Of the steps of a round so many lines are shown; the rest is a line with dots."""


@dataclass(frozen=True)
class Step:
    """One command of one person. `until`: it goes on running, and prints something that has this in it."""

    who: str
    command: str
    why: str
    until: str = ""
    installs: bool = False


STEPS = (
    Step("anna", "git clone REPOSITORY spes-p2p", "the program"),
    Step("anna", "cat spes-p2p/docs/*.md > text.txt", "some text to train on; your own is better"),
    Step("anna", f"{PROGRAM} tokenize text.txt --output shards", "installs, then makes token shards", installs=True),
    Step(
        "anna",
        f"{PROGRAM} bootstrap --config tiny --data shards --port 31337 swarm.min_peers=2",
        "begins the run and prints the invitation, which Anna sends to Ben; goes on running",
        until=r"or, using the address:\s+spes-p2p join \S.*\n",
    ),
    Step(
        "anna",
        f"{PROGRAM} join INVITATION",
        "in a second terminal: her machine trains, too",
        until="waiting for others",
    ),
    Step("ben", "git clone REPOSITORY spes-p2p", "the program"),
    Step(
        "ben",
        f"{PROGRAM} join INVITATION",
        "installs, then trains",
        until=r"round 2 committed.*\n",
        installs=True,
    ),
)
AFTERWARDS = (
    Step("ben", f"{PROGRAM} status INVITATION", "the run, as anybody sees it"),
    Step("ben", f"{PROGRAM} export INVITATION --tokenizer byte --output model", "the newest model, for transformers"),
)


@dataclass
class Person:
    """A machine: its namespace, its folder, and what goes on running there."""

    host: Host
    folder: Path
    running: list[tuple[Step, subprocess.Popen[bytes]]] = field(default_factory=list)

    def log(self, step: Step) -> Path:
        return self.folder / f"{step.who}-{abs(hash(step))}.log"


@dataclass(frozen=True)
class Done:
    """A step, when it was typed (seconds since the first), and how long it took until the next could be typed."""

    step: Step
    at_seconds: float
    seconds: float
    installing_seconds: float
    installing_cpu_seconds: float
    printed: str


class Story:
    """Carries steps out, one after the other."""

    def __init__(self, stack: ExitStack, people: dict[str, Person], repository: str) -> None:
        self.people = people
        self.invitation = ""
        self._repository = repository
        self._began = time.monotonic()
        stack.callback(self.end)

    def do(self, step: Step) -> Done:
        """Raises SystemExit where the command fails, or takes longer than a quarter of an hour."""
        person, began, used = self.people[step.who], time.monotonic(), _cpu_seconds()
        typed = step.command.replace("REPOSITORY", self._repository).replace("INVITATION", self.invitation)
        with open(person.log(step), "wb") as log:
            if step.installs:
                self._wait(person, step, self._start(person, "spes-p2p/scripts/venv.sh", log, inside=False))
            installed, used = (time.monotonic() - began) * step.installs, (_cpu_seconds() - used) * step.installs
            inside = not typed.startswith("git clone ")  # which needs a way out, and nothing of the others
            process = self._start(person, f"exec {typed}" if step.until else typed, log, inside)
            if step.until:
                person.running.append((step, process))
            self._wait(person, step, process)
        ended, words = time.monotonic(), person.log(step).read_bytes().decode(errors="replace")
        if found := re.search(r"spes1\w+", words):
            self.invitation = found[0]
        return Done(step, began - self._began, ended - began, installed, used, words)

    def leave(self) -> Iterator[Done]:
        """Ctrl-C everywhere, in the order in which people would: peers first."""
        for person in reversed(self.people.values()):
            for step, process in reversed(person.running):
                began, before = time.monotonic(), len(person.log(step).read_bytes())
                process.send_signal(signal.SIGINT)
                process.wait(LEAVE_SECONDS)
                words = person.log(step).read_bytes()[before:].decode(errors="replace")
                yield Done(step, began - self._began, time.monotonic() - began, 0.0, 0.0, words)

    def end(self) -> None:
        for person in self.people.values():
            for _, process in person.running:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def _start(self, person: Person, command: str, log: object, inside: bool) -> subprocess.Popen[bytes]:
        here = {"HOME": str(person.folder), "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        own = os.environ.get("VIRTUAL_ENV", "-")
        path = ":".join(part for part in kept["PATH"].split(":") if not part.startswith(own))
        return subprocess.Popen(
            [*(person.host.prefix if inside else ()), *self._core_of(person), "bash", "-c", command],
            cwd=person.folder, env=kept | here | {"PATH": path}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,  # type: ignore[call-overload]
        )  # fmt: skip

    def _core_of(self, person: Person) -> tuple[str, ...]:
        """Where there are several, each machine has one core of the host: it would not lend its own to another one."""
        cores = sorted(os.sched_getaffinity(0))
        return ("taskset", "-c", str(cores[list(self.people.values()).index(person) % len(cores)]))

    def _wait(self, person: Person, step: Step, process: subprocess.Popen[bytes]) -> None:
        goes_on = any(process is other for _, other in person.running)
        until = time.monotonic() + LATE_SECONDS
        while process.poll() is None and time.monotonic() < until:
            if goes_on and re.search(step.until, person.log(step).read_text(errors="replace")):
                return
            time.sleep(0.1)
        if process.returncode != 0 or goes_on:
            raise SystemExit(f"{step.command}: ended with {process.poll()}\n{person.log(step).read_text()}")


def _cpu_seconds() -> float:
    """Of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def plain(text: str, people: Sequence[Person], repository: str, invitation: str) -> str:
    """What was printed, without what only this machine has; ids shortened."""
    text = re.sub(r"[^\n]*\r(?!\n)", "", text)  # progress that was written over
    for person in people:
        text = text.replace(str(person.folder), "~")
    text = text.replace(repository, "REPOSITORY").replace(platform.release(), "6")
    text = text.replace(invitation, f"{invitation[:9]}...") if invitation else text
    text = re.sub(r"\b(Qm)\w{38}(\w{6})\b", r"\1...\2", text)
    return re.sub(r"\b([0-9a-f]{16})[0-9a-f]{48}\b", r"\1...", text)


def folded(text: str) -> Iterator[str]:
    """Its lines, with dots for most of the steps of each round."""
    steps = 0
    for line in text.splitlines():
        steps = steps + 1 if line.startswith("step ") else 0
        if steps <= SHOWN_STEPS:
            yield line
        elif steps == SHOWN_STEPS + 1:
            yield "..."


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def block(done: Done, words: str) -> str:
    lines = [f"{done.step.who}$ {done.step.command.replace('INVITATION', 'spes1...')}", *folded(words)]
    return "\n".join(["```text", *(line.rstrip() for line in lines if line.strip()), "```"])


def table(found: Sequence[Done]) -> str:
    rows = [
        "| typed at | by | command | why | seconds | of these installing |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for done in found:
        command = done.step.command.replace("INVITATION", "spes1...")
        installing = f"{done.installing_seconds:.0f}" if done.step.installs else ""
        rows.append(
            f"| {clock(done.at_seconds)} | {done.step.who.capitalize()} | `{command}` | {done.step.why} "
            f"| {done.seconds:.1f} | {installing} |"
        )
    return "\n".join(rows)


PAGE = """\
# First contact

<!-- Written by scripts/make_first_contact.py, which says how; run it again rather than edit this. -->

From `git clone` to a swarm that trains on two machines: Anna begins a run and trains in it, Ben joins.
**{count} commands, {annas} of them Anna's and {bens} Ben's; {whole} (minutes:seconds) until round 2 is committed,
{installing} of them the two installations**, one command after the other, as if Ben began only when he had the
invitation. Nobody edits a file.

The machines are two network namespaces of one host ({cores} CPU cores, Linux, Python {python}, no GPU), Anna's at
{anna} and Ben's at {ben}, each with a core, a clone, an installation and a home folder of its own. **Other work
kept the host busy** (a load of {load:.0f} on {cores} cores): of their {installing} the installations had the
processor for {cpu}. PyTorch came from a nearby disk, as the build for CPUs; the usual build is gigabytes to
download, and the minutes are those of your connection. The namespaces reach nothing but each other: the clones, and
the installation that a first command makes, used the host's network.

{table}

The first call of `scripts/spes-p2p.sh` installs into `.venv` of its clone, later ones only run the program. In a
terminal a peer shows [a screen](running-a-peer.md#the-screen) instead of lines. A peer behind a router needs nothing
else; a bootstrap node [must be reachable](bootstrap-node.md).

## What was printed

In the order in which it was typed. Folders and the kernel's version are left out; invitation, peer ids and hashes are
shortened; of a round only the first steps are shown. The step of a committed round is the mean of the steps that its
peers made, so it may be one that a peer has passed: [what the lines say](running-a-peer.md#the-lines).

{printed}

## And then

{after}

Ctrl-C, {leaving}. What each printed from then on:

{left}
"""


def page(found: Sequence[Done], after: Sequence[Done], left: Sequence[Done], story: Story, repository: str) -> str:
    def printed(those: Sequence[Done]) -> str:
        people = list(story.people.values())
        return "\n\n".join(block(done, plain(done.printed, people, repository, story.invitation)) for done in those)

    count = {who: sum(done.step.who == who for done in found) for who in story.people}
    words = (
        "first for Ben's peer, which was gone after {:.1f} s",
        "then Anna's, {:.1f} s",
        "then the bootstrap node, {:.1f} s",
    )
    return PAGE.format(
        count=len(found), annas=count["anna"], bens=count["ben"],
        whole=clock(found[-1].at_seconds + found[-1].seconds),
        installing=clock(sum(done.installing_seconds for done in found)),
        cpu=clock(sum(done.installing_cpu_seconds for done in found)), load=os.getloadavg()[2],
        cores=os.cpu_count(), python=platform.python_version(),
        anna=story.people["anna"].host.address, ben=story.people["ben"].host.address,
        table=table(found), printed=printed(found), after=printed(after), left=printed(left),
        leaving=", ".join(text.format(done.seconds) for text, done in zip(words, left, strict=True)),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repository", default=str(ROOT), help="what is cloned (default: this repository)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "first-contact.md")
    arguments = parser.parse_args()
    if not may_make_namespaces():
        raise SystemExit("make_first_contact.py needs root and iproute2, to make network namespaces")
    with ExitStack() as stack:
        lab = Lab(stack, tag=f"f{os.getpid() % 100000}")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spes-p2p-first-")))
        people = {}
        for name, address in (("anna", "11.0.0.2"), ("ben", "11.0.0.3")):
            (folder / name).mkdir()
            people[name] = Person(lab.host(name, "net", address), folder / name)
        story = Story(stack, people, arguments.repository)
        found, after = ([story.do(step) for step in steps] for steps in (STEPS, AFTERWARDS))
        text = page(found, after, list(story.leave()), story, arguments.repository)
    arguments.output.write_text(text)
    print(f"{arguments.output}: {len(found)} commands")


if __name__ == "__main__":
    main()
