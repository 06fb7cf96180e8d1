"""What people do wrong with join, bootstrap and status: one clear line with the value and the fix, exit code 1 or 3."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spes_p2p.sync.chain import Chain
from tests.cli.conftest import LOOPBACK, Answer, Organiser, spes_p2p
from tests.peer.real import make_tokens
from tests.sync.chains import MadeRun
from tests.sync.swarm_cases import small_config

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xdcEn"


def refused(answer: Answer, *words: str, code: int = 1) -> None:
    """It ended with one error, which has a code, and one fix: they have all these words, in this order."""
    assert answer.exit_code == code, answer
    assert len(re.findall(r"^Error E\d{3}: ", answer.errors, re.M)) == 1, answer
    assert len(re.findall(r"^Fix: ", answer.errors, re.M)) == 1, answer
    said = answer.errors[answer.errors.index("Error E") :]
    at = 0
    for word in words:
        assert word in said[at:], (word, said)
        at += said[at:].index(word) + len(word)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port of something that accepts and says nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield silent.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "words", "code"),
    [
        (NOBODY, ("no initial peer can be reached", NOBODY, "refuses connections"), 1),
        ("nonsense", ("nonsense is not a multiaddress (must begin with /)", "/ip4/HOST/tcp/PORT/p2p/Qm..."), 3),
        ("/ip4/127.0.0.1/tcp/99", ("lacks the peer id", "/p2p/", "/ip4/HOST/tcp/PORT/p2p/Qm..."), 3),
    ],
)
def test_an_initial_peer_that_is_no_use(tmp_path: Path, address: str, words: tuple[str, ...], code: int) -> None:
    refused(spes_p2p("join", "--initial-peers", address, "-o", str(tmp_path)), *words, code=code)
    refused(spes_p2p("status", "--initial-peers", address), *words, code=code)


def test_each_of_several_initial_peers_has_its_reason(tmp_path: Path, listener: int) -> None:
    silent = f"/ip4/127.0.0.1/tcp/{listener}/p2p/QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xdcEn"
    refused(spes_p2p("join", "--initial-peers", NOBODY, silent), f"{silent} is an address without a flag", code=3)
    answer = spes_p2p("join", "--initial-peers", NOBODY, "--initial-peers", silent, "-o", str(tmp_path))
    refused(
        answer,
        NOBODY,
        "refuses connections",
        silent,
        "is silent: the host accepts connections, but nothing there speaks libp2p",
    )


def test_a_wrong_peer_id_is_told_with_the_right_one(tmp_path: Path, organiser: Organiser) -> None:
    place, _, peer = organiser.address.partition("/p2p/")
    wrong = f"{place}/p2p/QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xdcEn"
    refused(spes_p2p("join", "--initial-peers", wrong, "-o", str(tmp_path)), "has a wrong peer id", peer)


def test_nobody_serves_the_run_that_is_announced(tmp_path: Path, organiser: Organiser) -> None:
    answer = organiser.join(tmp_path, "--run-id", "big")
    refused(answer, "no run 'big' is announced here, only tiny (", "give --run-id tiny")
    answer = organiser.join(tmp_path, "--fingerprint", "0000")
    refused(answer, "no run with fingerprint 0000 is announced here, only tiny (", "--fingerprint")
    refused(spes_p2p("status", "--initial-peers", organiser.address, "--run-id", "big"), "no run 'big'")


def test_another_config_than_the_runs(tmp_path: Path, organiser: Organiser) -> None:
    answer = organiser.join(tmp_path, "--config", "tiny")
    refused(answer, "--config differs from the config of run tiny", "model.d_model is 128 here and 32 there", code=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model.num_experts=4",), ("model.num_experts=4 cannot be set for one peer", "use 8", "output.")),
        (("output.tensorboard=maybe",), ("output.tensorboard is 'maybe'", "set output.tensorboard to true or false")),
        (("output.tensorbord=true",), ("unknown key output.tensorbord", "did you mean output.tensorboard?")),
        (("--owned-experts", "3,99"), ("--owned-experts names column 99, but the run has 8 (0 to 7)",)),
        (("--owned-experts", "3-5", "--max-experts", "2"), ("names 3 columns, but --max-experts is 2", "claim fewer")),
        (("--owned-experts", "two"), ("--owned-experts 'two' is not a list of columns", "0,3-5")),
        (("--data", "nowhere"), ("there is no dataset at nowhere", "spes-p2p tokenize")),
        (("data.source=local",), ("no training data was given", "data.source=local", "--data DIR")),
        (("--config", "tinny"), ("no bundled config named tinny", "did you mean tiny")),
        (("--host-maddrs", "rubbish"), ("--host-maddrs rubbish is not a multiaddress", "/ip4/0.0.0.0/tcp/PORT")),
        (("--port", "4001"), ("--port 4001 and --host-maddrs /ip4/", "both say where to listen", "give --port, or")),
    ],
)
def test_flags_that_cannot_be(
    tmp_path: Path, organiser: Organiser, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(organiser.join(tmp_path, *arguments), *words, code=1 if "nowhere" in arguments else 3)


def test_no_cuda(tmp_path: Path, organiser: Organiser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = organiser.join(tmp_path, "--device", "cuda", "--cores", "999")
    refused(answer, "--device cuda: torch sees no GPU here", "--device cpu")
    assert re.search(r"--cores 999: there (is|are) only \d+ here", answer.output + answer.errors)


def test_ranks_that_do_not_divide_the_batch(tmp_path: Path, organiser: Organiser) -> None:
    answer = organiser.join(tmp_path, "--data", str(organiser.data), "--local-ranks", "3")
    refused(answer, "a batch of 8 sequences cannot be split over 3 ranks")


def test_a_truncated_shard(tmp_path: Path, organiser: Organiser) -> None:
    copy = Path(shutil.copytree(organiser.data, tmp_path / "tokens"))
    shard = next(copy.glob("*.npy"))
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(organiser.join(tmp_path / "peer", "--data", str(copy)), f"shard {shard} is truncated", "copy")


def test_another_dataset_than_the_runs(tmp_path: Path, organiser: Organiser) -> None:
    other = make_tokens(tmp_path / "other", words=2000, seed=1)
    refused(organiser.join(tmp_path / "peer", "--data", str(other)), "has hash", "the run trains on", "source=local")


def test_less_data_than_a_batch(tmp_path: Path, organiser: Organiser) -> None:
    few = make_tokens(tmp_path / "few", words=20)
    answer = organiser.join(tmp_path / "peer", "--data", str(few), "data.source=local")
    refused(answer, "training sequences of 64 tokens, fewer than one batch (8)", "use more data")


def test_less_data_than_a_round_needs(tmp_path: Path) -> None:
    few = str(make_tokens(tmp_path / "few", words=500))
    node = ("-o", str(tmp_path / "node"))
    words = ("29 training sequences of 128 tokens", "but a round needs 240", "tokenize more text")
    refused(spes_p2p("bootstrap", "--config", "tiny", "--data", few, *node), *words)
    assert not (tmp_path / "node").exists()


def test_a_tokenizer_that_is_larger_than_the_vocabulary_or_the_dtype(tmp_path: Path, tokens: Path) -> None:
    answer = spes_p2p(
        "bootstrap", "--config", "tiny", "--data", str(tokens), "-o", str(tmp_path), "model.vocab_size=99"
    )
    refused(answer, "tokenizer 'byte' of 257 ids, but model.vocab_size is 99", "set model.vocab_size to 257")


def test_two_peers_with_one_identity(tmp_path: Path, organiser: Organiser) -> None:
    identity = organiser.folder / "identity.key"
    answer = organiser.join(tmp_path, "--identity-path", str(identity))
    refused(answer, "another process on this machine (process ", ") is using the identity", "--output DIR")
    assert "loading PyTorch" not in answer.output
    shutil.copy(identity, tmp_path / "copy.key")
    answer = organiser.join(tmp_path, "--identity-path", str(tmp_path / "copy.key"))
    refused(answer, "another process in this swarm is using the identity", "--output DIR")


def test_an_output_folder_that_cannot_be_made(tmp_path: Path, organiser: Organiser) -> None:
    (tmp_path / "file").write_text("")
    refused(organiser.join(tmp_path / "file" / "peer"), "cannot be created: Not a directory", "--output")


def test_the_folder_of_another_run_is_as_it_was(tmp_path: Path, organiser: Organiser) -> None:
    run = MadeRun(small_config(peers=1))
    Chain(tmp_path / "run" / "chain").append(run.chain(1)[0])
    data = tmp_path / "data"
    data.mkdir()
    for name in ("catalogue", "pieces.bin", "numbers.bin"):
        (data / name).write_text(f"{name} of the other run")
    refused(organiser.join(tmp_path), "holds another run", "--output", code=3)
    for path in data.iterdir():
        assert path.read_text() == f"{path.name} of the other run"


def test_a_port_in_use(tmp_path: Path, tokens: Path, listener: int) -> None:
    place = f"/ip4/127.0.0.1/tcp/{listener}"
    answer = spes_p2p(
        "bootstrap", "--config", "tiny", "--data", str(tokens), "-o", str(tmp_path), "--host-maddrs", place
    )
    refused(answer, f"port {listener} is in use", "--port")


def test_bootstrap_without_data(tmp_path: Path) -> None:
    answer = spes_p2p("bootstrap", "--config", "tiny", "-o", str(tmp_path), "--host-maddrs", LOOPBACK)
    refused(answer, "there is no training data", "--data", "data.source=local")


def test_bootstrap_that_serves_nothing_or_twice(tmp_path: Path) -> None:
    serve = ("bootstrap", "--serve", "-o", str(tmp_path), "--host-maddrs", LOOPBACK)
    refused(spes_p2p(*serve), "--serve needs a run to serve", "--config")
    twice = spes_p2p(*serve, "--config", "tiny", "--archive", str(tmp_path / "archive"))
    refused(twice, "--serve already keeps the newest state in --output", "leave --archive out")
