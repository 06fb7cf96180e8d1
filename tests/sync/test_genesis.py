"""What a run's name stands for, and who may begin it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.consensus.messages import Commit
from spes_p2p.errors import ConfigError, RemoteProtocolError
from spes_p2p.ids import sha256
from spes_p2p.sync.genesis import GENESIS, check_genesis, check_run, describe_run
from tests.sync.chains import ORGANISER, B, MadeRun
from tests.sync.swarm_cases import small_config

RUN = MadeRun()
GOOD = RUN.genesis(sha256(b"state"))


def test_the_config_comes_out_of_the_run_again() -> None:
    config = check_run(RUN.info, RUN.info.fingerprint)
    assert config.model == RUN.config.model
    assert describe_run(config, RUN.info.dataset, ORGANISER) == RUN.info


def test_local_choices_do_not_change_the_run() -> None:
    config = small_config("output.keep_checkpoints=9", "eval.sequences=3", peers=1)
    assert describe_run(config, RUN.info.dataset, ORGANISER).config_fingerprint == RUN.info.config_fingerprint


@pytest.mark.parametrize(
    "other",
    [
        replace(RUN.info, dataset=sha256(b"other data")),
        replace(RUN.info, organiser=B),
        replace(RUN.info, run_id="other"),
        describe_run(small_config("optimizer.lr=1e-4", peers=1), RUN.info.dataset, ORGANISER),
    ],
)
def test_a_run_with_another_fingerprint_is_refused_with_the_fix(other: object) -> None:
    assert isinstance(other, type(RUN.info))
    with pytest.raises(RemoteProtocolError, match=f"but {RUN.info.fingerprint.hex()[:16]} was expected") as caught:
        check_run(other, RUN.info.fingerprint)
    assert "organiser" in caught.value.fix


@pytest.mark.parametrize(("version", "fix"), [(0, "the run"), (99, "this program")])
def test_another_wire_version_is_refused_with_the_fix(version: int, fix: str) -> None:
    info = replace(RUN.info, wire_version=version)
    with pytest.raises(RemoteProtocolError, match=f"speaks wire version {version}, but") as caught:
        check_run(info, info.fingerprint)
    assert fix in caught.value.fix


def test_a_config_that_is_not_what_the_record_says_is_refused() -> None:
    info = replace(RUN.info, config_fingerprint=sha256(b"another config"))
    with pytest.raises(RemoteProtocolError, match="does not hash to its fingerprint") as caught:
        check_run(info, info.fingerprint)
    assert "same spes-p2p version" in caught.value.fix


def test_the_name_of_a_run_is_that_of_its_config() -> None:
    """It has been checked there; anybody could write anything here."""
    info = replace(RUN.info, run_id="\x1b[2Jtiny")
    with pytest.raises(RemoteProtocolError, match=r"run '\\x1b\[2Jtiny' is that of run tiny"):
        check_run(info, info.fingerprint)


def test_an_organiser_is_told_of_a_config_that_nobody_would_take() -> None:
    stages = tuple((number, 50, 50) for number in (*range(1, 6000), 0))
    data = RUN.config.data.model_copy(update={"mix": stages})
    with pytest.raises(ConfigError, match=r"as it is published, has \d+ characters, over 65536"):
        describe_run(RUN.config.model_copy(update={"data": data}), RUN.info.dataset, ORGANISER)


def test_genesis_of_the_organiser_is_taken() -> None:
    check_genesis(GOOD, RUN.info, RUN.keys.verify)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (RUN.genesis(sha256(b"state"), signer=B), "not signed by the organiser"),
        (Commit(GOOD.certificate, replace(GOOD.manifest, state_root=sha256(b"other"))), "names another manifest"),
        (Commit(replace(GOOD.certificate, seals=()), GOOD.manifest), "names another manifest"),
        (Commit(replace(GOOD.certificate, kind="quorum"), GOOD.manifest), "not the genesis"),
        (Commit(GOOD.certificate, replace(GOOD.manifest, round=1)), "not the genesis"),
        (MadeRun(small_config("run.run_id=x", peers=1)).genesis(sha256(b"state")), "not the genesis"),
    ],
)
def test_any_other_genesis_is_refused(bad: Commit, complaint: str) -> None:
    assert bad.certificate.kind in (GENESIS, "quorum")
    with pytest.raises(RemoteProtocolError, match=complaint):
        check_genesis(bad, RUN.info, RUN.keys.verify)


def test_a_seal_that_the_organiser_made_for_another_run_is_refused() -> None:
    other = MadeRun(small_config("run.run_id=x", peers=1)).genesis(sha256(b"state"))
    seal = other.certificate.seals[0]
    with pytest.raises(RemoteProtocolError, match="not signed by the organiser"):
        check_genesis(Commit(replace(GOOD.certificate, seals=(seal,)), GOOD.manifest), RUN.info, RUN.keys.verify)
