"""`spes-p2p receipt --check`: what a receipt says, why it is refused, and that it loads nothing large."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.peer import receipts
from spes_p2p.swarm.invite import Invite, encode
from spes_p2p.sync.receipts import pack_receipt
from tests.cli.conftest import spes_p2p
from tests.cli.test_errors import refused
from tests.sync.test_receipts import Signers

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmPMmEuQEhiWKApkWkZS28LC215rtojb6xARi1ex6xdcEn"


@pytest.fixture(scope="module")
def signers() -> Signers:
    return Signers()


@pytest.fixture
def file(tmp_path: Path, signers: Signers) -> Path:
    path = tmp_path / "receipt.spes"
    path.write_bytes(pack_receipt(signers.receipt(signers.organiser)))
    return path


def test_a_good_one_is_read_out(file: Path, signers: Signers) -> None:
    info = signers.info
    word = encode(Invite(info.run_id, info.fingerprint, info.organiser, (ADDRESS,)))
    for named in ((), ("--fingerprint", info.fingerprint.hex()[:12]), (word,)):
        said = spes_p2p("receipt", *named, "--check", str(file)).output
        assert (
            f"run {info.run_id} with fingerprint {info.fingerprint.hex()} has counted of {signers.worker.peer_id}"
            in said
        )
        assert "3,000 tokens (33.3% of the run's) and 300 steps, in 30 of 40 rounds" in said
        assert "\n  12 of these rounds audited: 11 passed, 0 failed, 1 not shown anything\n" in said
        assert "signed by its organiser" in said


def test_others_are_refused_with_the_reason(file: Path, signers: Signers) -> None:
    check = ("receipt", "--check", str(file))
    refused(spes_p2p(*check, "--fingerprint", "0000"), "is a receipt of run tiny", "not of 0000")
    honest = signers.receipt(signers.organiser)
    file.write_bytes(pack_receipt(replace(honest, account=replace(honest.account, tokens=4000))))
    refused(spes_p2p(*check), "is not a good receipt", "is not in the ledger")
    file.write_bytes(b"something else")
    refused(spes_p2p(*check), "is not a good receipt", "this is no receipt")
    file.unlink()
    refused(spes_p2p(*check), "cannot be read")
    refused(spes_p2p("receipt", "--output", str(file.parent)), "holds no invitation")


def test_whose_folder_may_not_be_written_to_is_told_so(
    tmp_path: Path, signers: Signers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, data: bytes) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "invite.txt").write_text(encode(Invite("tiny", bytes(16), signers.info.organiser, (ADDRESS,))))
    (tmp_path / "run" / "chain").mkdir(parents=True)
    (tmp_path / "run" / "peer_id").write_text(signers.worker.peer_id)
    monkeypatch.setattr(receipts, "visit", lambda run, look: b"a receipt")
    monkeypatch.setattr(receipts, "write_whole", write)
    answer = spes_p2p("receipt", "--output", str(tmp_path))
    refused(answer, f"{tmp_path / 'receipt.spes'} cannot be read or written: Permission denied", "belong to you")


def test_a_check_loads_neither_torch_nor_the_network(file: Path) -> None:
    """Or it would take seconds."""
    program = (
        "import sys; from spes_p2p.cli.main import main; sys.argv[0] = 'spes-p2p'\n"
        "try: main()\n"
        "finally: print(*({'torch', 'hivemind'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, "receipt", "--check", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "signed by its organiser\n\n" in said
