"""Signals to a node: the first one asks, the second one and the end of its time end it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from spes_p2p.errors import Stopped
from spes_p2p.peer import stopping
from spes_p2p.peer.stopping import INTERRUPTED, interrupted_by_signals, leaving_on_signals, until_stopped

PROGRAM = """
import signal, sys, threading
from spes_p2p.peer import stopping
stopping.EXIT_SECONDS, stopping.SAY_SECONDS = float(sys.argv[1]), float(sys.argv[3])
asked = threading.Event()
def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()
with stopping.leaving_on_signals(asked.set, say):
    print("up", flush=True)
    if sys.argv[2] == "computes":  # as in native code: nothing interrupts the main thread
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Event().wait()
    asked.wait()
    if sys.argv[2] == "leaves":
        say("left")
    elif sys.argv[2] == "hangs":
        threading.Event().wait()
if sys.argv[2] == "ends slowly":
    threading.Event().wait()
"""


WAIT_SECONDS = 60.0
STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
        process.wait()


def start(exit_seconds: float, behaviour: str, say_seconds: float = WAIT_SECONDS) -> subprocess.Popen[str]:
    """`say_seconds`: long, where there is a reader: on a busy machine a thread that says a word may need them."""
    command = [sys.executable, "-c", PROGRAM, str(exit_seconds), behaviour, str(say_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    STARTED.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def rest(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    with process.stdout as stream:
        return stream.read().splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_lets_it_leave(number: signal.Signals) -> None:
    process = start(60.0, "leaves")
    process.send_signal(number)
    assert "left" in rest(process)
    assert process.wait() == 0


def test_a_second_signal_ends_it_at_once() -> None:
    process = start(60.0, "hangs")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("leaving")
    process.send_signal(signal.SIGINT)
    assert rest(process) == []
    assert process.wait() == INTERRUPTED


def test_a_closed_terminal_is_one_wish_to_leave_however_often_it_is_said() -> None:
    process = start(0.05, "hangs")
    assert process.stdout is not None
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline().startswith("leaving")
    process.send_signal(signal.SIGHUP)
    assert rest(process)[-1].endswith("by itself: nothing is lost")
    assert process.wait() == 0


def test_what_is_to_outlive_its_terminal_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with leaving_on_signals(lambda: None, lambda text: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_job_in_the_background_of_a_script_heeds_ctrl_c_too() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells start such jobs
    try:
        process = start(60.0, "leaves")
    finally:
        signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    assert "left" in rest(process)
    assert process.wait() == 0


def test_who_has_left_is_not_said_to_have_lost_anything_where_the_process_ends_slowly() -> None:
    process = start(2.0, "ends slowly")
    process.send_signal(signal.SIGTERM)
    assert rest(process) == ["leaving (press Ctrl-C again to exit at once)"]
    assert process.wait() == 0


def test_what_does_not_end_in_time_is_ended() -> None:
    process = start(0.05, "hangs")
    process.send_signal(signal.SIGTERM)
    assert rest(process)[-1].endswith("by itself: nothing is lost")
    assert process.wait() == 0


@pytest.mark.parametrize(("exit_seconds", "signals", "code"), [(0.05, 1, 0), (60.0, 2, INTERRUPTED)])
def test_it_ends_in_time_though_nobody_reads_its_words(exit_seconds: float, signals: int, code: int) -> None:
    process = start(exit_seconds, "hangs", stopping.SAY_SECONDS)
    assert process.stdout is not None
    process.stdout.close()  # as `| tee` does, which Ctrl-C ends too
    process.send_signal(signal.SIGINT)
    if signals == 2:
        while process.poll() is None:  # the same number twice may be taken as one
            process.send_signal(signal.SIGINT)
            threading.Event().wait(0.05)
    assert process.wait(WAIT_SECONDS) == code


def test_signals_are_heard_while_the_main_thread_is_deep_in_native_code() -> None:
    process = start(0.05, "computes")
    process.send_signal(signal.SIGTERM)
    assert rest(process)[0].startswith("leaving")
    assert process.wait() == 0


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with leaving_on_signals(lambda: None, lambda text: None):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_block_that_cleans_up_does_so_after_each_signal(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_who_is_in_the_background_goes_on_when_others_are_interrupted() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupted_by_signals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def look() -> None:
        with leaving_on_signals(lambda: None, lambda text: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]


def test_work_that_ends_gives_its_result_or_its_error() -> None:
    async def good() -> int:
        return 3

    async def bad() -> int:
        raise ValueError("bad")

    async def main() -> int:
        with pytest.raises(ValueError, match="bad"):
            await until_stopped(asyncio.Event(), bad())
        return await until_stopped(asyncio.Event(), good())

    assert asyncio.run(main()) == 3


def test_work_is_broken_off_and_cleans_up_before_anybody_goes_on() -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_soon(stop.set)
        with pytest.raises(Stopped):
            await until_stopped(stop, work())
        steps.append("went on")

    asyncio.run(main())
    assert steps == ["cleaned up", "went on"]
