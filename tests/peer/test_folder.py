"""One output folder serves one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from spes_p2p.errors import ConfigError, PermanentError, StateError
from spes_p2p.files import make_folder
from spes_p2p.ids import PeerId, sha256
from spes_p2p.peer.folder import as_it_began, claim_folder, holds_run, open_archive
from spes_p2p.sync.chain import Chain
from tests.sync.chains import MadeRun

ME, OTHER = PeerId("QmMe"), PeerId("QmOther")


@pytest.fixture(scope="module")
def run() -> MadeRun:
    return MadeRun()


def begun(output: Path, run: MadeRun) -> Path:
    Chain(output / "run" / "chain").append(run.genesis(sha256(b"state")))
    return output


def test_a_new_folder_is_made_and_has_nothing_to_resume(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert not holds_run(tmp_path / "a" / "b")


def test_the_folder_of_another_identity_is_refused(tmp_path: Path, run: MadeRun) -> None:
    folder = tmp_path / "run"
    claim_folder(folder, run.info, run.layout, OTHER)
    claim_folder(folder, run.info, run.layout, ME)  # nothing had begun
    assert holds_run(begun(tmp_path, run))
    claim_folder(folder, run.info, run.layout, ME)
    with pytest.raises(PermanentError, match=f"belongs to peer {ME}, but this peer is {OTHER}") as caught:
        claim_folder(folder, run.info, run.layout, OTHER)
    assert "--identity-path" in caught.value.fix


def test_checkpoints_alone_are_a_run_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert holds_run(tmp_path)


def test_waiting_in_vain_leaves_no_run_behind(tmp_path: Path, run: MadeRun) -> None:
    claim_folder(tmp_path / "run", run.info, run.layout, ME)
    run.store(tmp_path / "run" / "state").close()
    assert not holds_run(tmp_path)


def test_the_folder_of_another_run_is_refused(tmp_path: Path, run: MadeRun) -> None:
    begun(tmp_path, run)
    claim_folder(tmp_path / "run", run.info, run.layout, ME)
    other = replace(run.info, run_id="other")
    with pytest.raises(ConfigError, match=f"holds another run: its fingerprint is {run.info.fingerprint.hex()[:16]}"):
        claim_folder(tmp_path / "run", other, run.layout, ME)


@pytest.mark.parametrize("key", ["eos_id", "copies"])
def test_a_run_that_an_earlier_version_began_goes_on_as_it_began(tmp_path: Path, run: MadeRun, key: str) -> None:
    """That version did not know all keys that this one publishes."""
    tree = yaml.safe_load(run.info.config)
    del tree["data"][key]
    older = replace(run.info, config=yaml.safe_dump(tree, sort_keys=False))
    assert older.fingerprint != run.info.fingerprint
    assert as_it_began(tmp_path, run.info) == run.info
    claim_folder(tmp_path / "run", older, run.layout, ME)
    assert as_it_began(tmp_path, run.info) == older
    tree["data"]["tokenizer"] = "another"
    for other in (replace(run.info, config=yaml.safe_dump(tree)), replace(run.info, dataset=sha256(b"other"))):
        assert as_it_began(tmp_path, other) == other


def test_an_initial_state_of_another_run_that_never_began_is_not_kept(tmp_path: Path, run: MadeRun) -> None:
    folder = tmp_path / "run"
    claim_folder(folder, run.info, run.layout, ME)
    run.store(folder / "state").close()
    claim_folder(folder, run.info, run.layout, ME)
    assert (folder / "state").exists()
    claim_folder(folder, replace(run.info, run_id="other"), run.layout, ME)
    assert not (folder / "state").exists()


def test_nothing_is_removed_while_another_process_writes_there(tmp_path: Path, run: MadeRun) -> None:
    folder = tmp_path / "run"
    claim_folder(folder, run.info, run.layout, ME)
    store = run.store(folder / "state")
    with pytest.raises(StateError):
        claim_folder(folder, replace(run.info, run_id="other"), run.layout, ME)
    assert (folder / "state").exists()
    store.close()


def test_an_archive_belongs_to_one_run(tmp_path: Path, run: MadeRun) -> None:
    folder, initial = tmp_path / "archive", run.store(tmp_path / "initial")
    states = open_archive(folder, run.info, initial)
    root = states.version(0).root
    states.close()
    states = open_archive(folder, run.info, initial)  # after a restart
    assert states.rounds() == (0,)
    assert states.version(0).root == root == initial.version(0).root
    states.close()
    with pytest.raises(ConfigError, match="archive of another run") as caught:
        open_archive(folder, replace(run.info, run_id="another"), initial)
    assert "--archive" in caught.value.fix
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--archive cannot be created"):
        open_archive(tmp_path / "file", run.info, initial)
    initial.close()
