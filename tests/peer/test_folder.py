"""One output folder serves one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.errors import ConfigError, StateError
from spes_p2p.ids import sha256
from spes_p2p.peer.folder import claim_folder, holds_run, make_folder, open_archive, prepare_folder
from spes_p2p.sync.chain import Chain
from tests.sync.chains import MadeRun


@pytest.fixture(scope="module")
def run() -> MadeRun:
    return MadeRun()


def begun(output: Path, run: MadeRun) -> Path:
    Chain(output / "run" / "chain").append(run.genesis(sha256(b"state")))
    return output


def test_a_new_folder_is_made_and_has_nothing_to_resume(tmp_path: Path) -> None:
    assert prepare_folder(tmp_path / "a" / "b", resume=False) is False
    assert prepare_folder(tmp_path / "a" / "b", resume=True) is False


def test_a_folder_with_a_run_wants_resume(tmp_path: Path, run: MadeRun) -> None:
    begun(tmp_path, run)
    with pytest.raises(ConfigError, match="already holds a run") as caught:
        prepare_folder(tmp_path, resume=False)
    assert "--resume" in caught.value.fix
    assert prepare_folder(tmp_path, resume=True) is True


def test_checkpoints_alone_are_a_run_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert holds_run(tmp_path)


def test_waiting_in_vain_leaves_no_run_behind(tmp_path: Path, run: MadeRun) -> None:
    claim_folder(tmp_path / "run", run.info, run.layout)
    run.store(tmp_path / "run" / "state").close()
    assert prepare_folder(tmp_path, resume=False) is False


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created: Not a directory"):
        make_folder(tmp_path / "file" / "folder")


def test_the_folder_of_another_run_is_refused(tmp_path: Path, run: MadeRun) -> None:
    begun(tmp_path, run)
    claim_folder(tmp_path / "run", run.info, run.layout)
    other = replace(run.info, run_id="other")
    with pytest.raises(ConfigError, match=f"holds another run: its fingerprint is {run.info.fingerprint.hex()[:16]}"):
        claim_folder(tmp_path / "run", other, run.layout)


def test_an_initial_state_of_another_run_that_never_began_is_not_kept(tmp_path: Path, run: MadeRun) -> None:
    folder = tmp_path / "run"
    claim_folder(folder, run.info, run.layout)
    run.store(folder / "state").close()
    claim_folder(folder, run.info, run.layout)
    assert (folder / "state").exists()
    claim_folder(folder, replace(run.info, run_id="other"), run.layout)
    assert not (folder / "state").exists()


def test_nothing_is_removed_while_another_process_writes_there(tmp_path: Path, run: MadeRun) -> None:
    folder = tmp_path / "run"
    claim_folder(folder, run.info, run.layout)
    store = run.store(folder / "state")
    with pytest.raises(StateError):
        claim_folder(folder, replace(run.info, run_id="other"), run.layout)
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
