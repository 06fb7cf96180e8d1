"""Models on the hub, by huggingface_hub itself and a server on loopback that speaks the hub's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.errors import ConfigError, NetworkError
from spes_p2p.interop.card import NO_LICENCE, Facts, HeldOut, model_card, run_of_card, with_licence_of
from spes_p2p.interop.export import export_model
from spes_p2p.interop.hub import check_name, check_token, model_folder, push_folder
from spes_p2p.interop.weights import Format
from tests.interop.hub_server import Asked, HubServer, Refusal, hub_for
from tests.interop.states import OLMOE, random_state, run_config

NAME = "me/my-model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_for(monkeypatch, tmp_path / "cache") as server:
        yield server


def facts(**changes: object) -> Facts:
    known = Facts("a-run", "ab" * 32, "cd" * 32, run_config(**OLMOE), 7, 140, 12_345)
    return replace(known, **changes)  # type: ignore[arg-type]


def exported(folder: Path, **changes: object) -> Path:
    """A small model in two files."""
    folder.mkdir()
    about = facts(**changes)
    export_model(random_state(about.config)[1], about, folder, Format("fp32", 20_000), None)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def push(folder: Path, name: str = NAME, public: bool = False) -> tuple[str, list[str]]:
    said: list[str] = []
    return push_folder(folder, name, public, said.append), said


def test_a_model_goes_up_whole_and_private(hub: HubServer, tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    check_token()
    address, said = push(folder)
    assert hub.files(NAME) == content(folder)
    assert hub.repositories[NAME].private
    assert address == f"{hub.url}/{NAME}/tree/{hub.repositories[NAME].commits[-1][0]}"
    assert said == [f"created {NAME}, private"]
    push(folder, "me/open", public=True)
    assert not hub.repositories["me/open"].private


def test_what_is_there_is_not_sent_again(hub: HubServer, tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    places = iter([True])  # several files come at once: next() is atomic, a count of what has arrived is not

    def refuses(asked: Asked) -> Refusal | None:
        is_over = asked.path.startswith("/lfs/") and not next(places, False)
        return Refusal(507, "the storage is full") if is_over else None

    hub.refuses = refuses
    with pytest.raises(NetworkError, match=f"the hub answered 507 for {NAME}") as caught:
        push(folder)
    assert caught.value.fix == f"continue with: spes-p2p export --output {folder} --push {NAME}"
    assert len(hub.large) == 1  # one arrived before
    hub.refuses, hub.asked = lambda asked: None, []
    push(folder)
    assert hub.files(NAME) == content(folder)
    assert len(hub.sent("PUT", "/lfs/")) == len(list(folder.glob("*.safetensors"))) - 1
    hub.asked = []
    push(folder)
    assert hub.sent("PUT", "/lfs/") == hub.sent("POST", "/commit/") == []


def test_a_newer_round_of_the_run_takes_the_place_of_an_older_one(hub: HubServer, tmp_path: Path) -> None:
    push(exported(tmp_path / "older"))
    newer = exported(tmp_path / "newer", round=8)
    assert push(newer, public=True)[1] == [f"{NAME} is private and remains so; its settings on the hub change that"]
    assert hub.files(NAME) == content(newer)


def test_the_licence_that_was_chosen_stays(hub: HubServer, tmp_path: Path) -> None:
    first = exported(tmp_path / "first")
    card = first / "README.md"
    card.write_text(card.read_text().replace(NO_LICENCE, "license: apache-2.0"))
    push(first)
    second = exported(tmp_path / "second", round=8)
    push(second)
    sent = hub.files(NAME)["README.md"].decode()
    assert "\nlicense: apache-2.0\n---\n" in sent
    assert NO_LICENCE not in sent
    assert "| 8, 140 |" in sent
    assert (second / "README.md").read_text() == sent


@pytest.mark.parametrize("there", [{"README.md": b"# mine"}, {"model.safetensors": b"1"}])
def test_a_name_that_is_taken_stays_as_it_is(hub: HubServer, tmp_path: Path, there: dict[str, bytes]) -> None:
    hub.create(NAME, there)
    with pytest.raises(ConfigError, match=f"the name {NAME} is taken: it holds something else") as caught:
        push(exported(tmp_path / "model"))
    assert "choose another name" in caught.value.fix
    assert hub.files(NAME) == there


def test_a_model_of_another_run_stays(hub: HubServer, tmp_path: Path) -> None:
    push(exported(tmp_path / "theirs", fingerprint="99" * 32))
    with pytest.raises(ConfigError, match="it holds a model of another run"):
        push(exported(tmp_path / "model"))


def test_somebody_elses_private_name_is_taken(hub: HubServer, tmp_path: Path) -> None:
    hub.create(NAME, private=True)

    def refuses(asked: Asked) -> Refusal | None:  # for those who may not see it there is none
        return Refusal(404, "Repository not found", "RepoNotFound") if asked.path == f"/api/models/{NAME}" else None

    hub.refuses = refuses
    with pytest.raises(ConfigError, match=f"the name {NAME} is taken: you already created"):
        push(exported(tmp_path / "model"))


def test_without_the_right_to_write_there(hub: HubServer, tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    with pytest.raises(ConfigError, match="token may not write to other/model: you have no right to create") as caught:
        push(folder, "other/model")
    assert "a name of your own account" in caught.value.fix
    hub.create("other/model")
    with pytest.raises(ConfigError, match="token may not write to other/model: you have no right to write"):
        push(folder, "other/model")


@pytest.mark.parametrize(("token", "words"), [(None, "has no token"), ("hf_gone", "does not accept this machine's")])
def test_without_a_token_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str | None, words: str
) -> None:
    with hub_for(monkeypatch, tmp_path / "cache", token), pytest.raises(ConfigError, match=words) as caught:
        check_token()
    assert "hf auth login" in caught.value.fix
    assert "HF_TOKEN" in caught.value.fix


def test_a_hub_that_is_gone_is_a_network_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with hub_for(monkeypatch, tmp_path / "cache") as hub:
        pass
    assert hub.asked == []
    with pytest.raises(NetworkError, match="the transfer to or from the hub broke off"):
        check_token()


def test_a_machine_that_stays_offline_says_so(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for ask in (check_token, lambda: fetch(NAME), lambda: fetch(f"{NAME}@{'0' * 40}")):
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE keeps this machine from the hub"):
            ask()
    assert hub.asked == []


@pytest.mark.parametrize("name", ["my-model", "me/my/model", "me/", "me/a..b", "me/a--b", "-me/x", "https://x/y"])
def test_a_name_that_no_model_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no model on the Hugging Face hub"):
        check_name(name)


def test_only_an_exported_folder_is_pushed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no exported model"):
        push_folder(tmp_path, NAME, False, lambda text: None)


def fetch(name: str) -> tuple[Path, list[str]]:
    said: list[str] = []
    return model_folder(Path(name), said.append), said


def test_a_folder_without_a_card_makes_no_repository(hub: HubServer, tmp_path: Path) -> None:
    """As upcycle makes it: nothing says of which run it is."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no exported model"):
        push_folder(tmp_path, "me/start", public=False, say=lambda text: None)
    assert not hub.repositories


def test_a_model_comes_back_pinned_to_its_commit(hub: HubServer, tmp_path: Path) -> None:
    first = exported(tmp_path / "first")
    other = {"original/model.safetensors": b"0" * 40, "consolidated.safetensors": b"1" * 40, "model.bin": b"2" * 40}
    commit = hub.create(NAME, content(first) | other, private=True)
    folder, said = fetch(NAME)
    assert content(folder) == {name: data for name, data in content(first).items() if name != "README.md"}
    assert said == [f"the model {NAME} at commit {commit} of the Hugging Face hub"]
    newer = hub.repositories[NAME].commit(content(exported(tmp_path / "second", round=8)) | {"config.json": b"{}"})
    assert fetch(f"{NAME}@{commit}") == (folder, said)
    assert fetch(NAME)[0].name == newer
    hub.refuses = lambda asked: Refusal(403, "no")
    assert fetch(f"{NAME}@{commit}")[0] == folder  # what is whole here needs no hub


def test_a_download_that_broke_off_goes_on(hub: HubServer, tmp_path: Path) -> None:
    first = exported(tmp_path / "first")
    commit = hub.create(NAME, content(first))
    last = sorted(first.glob("*.safetensors"))[-1].name
    hub.refuses = lambda asked: Refusal(507, "broken") if asked.path.endswith(last) else None
    with pytest.raises(NetworkError, match=f"the hub answered 507 for {NAME}") as caught:
        fetch(NAME)
    assert caught.value.fix == "try again: what has come is kept"
    hub.refuses, hub.asked = lambda asked: None, []
    assert (fetch(NAME)[0] / last).read_bytes() == (first / last).read_bytes()
    assert [asked.path for asked in hub.sent("GET", "/resolve/")] == [f"/{NAME}/resolve/{commit}/{last}"]


def test_a_folder_is_itself_and_no_name_is_left_to_who_reads_it(hub: HubServer, tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "nowhere", Path("nowhere"), Path("a/b/c")):
        assert fetch(str(source)) == (source, [])
    assert hub.asked == []


def test_what_the_hub_does_not_have_or_keeps_is_named(hub: HubServer) -> None:
    with pytest.raises(ConfigError, match="me/none is neither a folder here nor a model on the"):
        fetch("me/none")
    hub.create(NAME)
    with pytest.raises(ConfigError, match=f"{NAME} on the Hugging Face hub has no revision 'v9'"):
        fetch(f"{NAME}@v9")
    hub.refuses = lambda asked: Refusal(403, "gated", "GatedRepo")
    with pytest.raises(ConfigError, match="only for those who accept its terms") as caught:
        fetch(NAME)
    assert f"https://huggingface.co/{NAME}" in caught.value.fix


def test_a_card_has_the_facts_and_leaves_the_licence_to_the_user() -> None:
    card = model_card(facts(peers=5, held_out=HeldOut(2, 3.5)), "OlmoeForCausalLM", "bf16")
    header = card.split("---\n")[1]
    assert NO_LICENCE in header
    for fact in ("# a-run", "| peers | up to 5 in a round |", "| held-out loss | 3.5000 (round 2) |"):
        assert fact in card
    assert run_of_card(card) == "ab" * 32
    assert run_of_card("# a model\n") is None
    assert "| peers | unknown |" in model_card(facts(), "OlmoeForCausalLM", "bf16")


def test_a_licence_is_taken_over_and_never_replaced() -> None:
    card = model_card(facts(), "OlmoeForCausalLM", "bf16")
    mine = card.replace(NO_LICENCE, "license: other\nlicense_name: mine")
    assert with_licence_of(card, mine).count("license: other\nlicense_name: mine\n---\n") == 1
    assert with_licence_of(mine, card.replace(NO_LICENCE, "license: mit")) == mine
    assert with_licence_of(card, card) == with_licence_of(card, "no header") == card
    assert json.dumps(with_licence_of("no header", mine)) == '"no header"'
