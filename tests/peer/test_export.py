"""Exporting from a peer's checkpoint, and from a live run by its newest manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from spes_p2p.checkpoint.save import save_checkpoint
from spes_p2p.config.load import published_config, published_yaml
from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import WIRE_VERSION
from spes_p2p.data.tokenizers import ByteTokenizer
from spes_p2p.errors import CheckpointError, ConfigError, DataError, NetworkError
from spes_p2p.exchange.transfers import fill_state
from spes_p2p.ids import Hash, PeerId
from spes_p2p.interop.card import Facts, HeldOut
from spes_p2p.interop.export import export_model
from spes_p2p.interop.tokenizer import byte_level
from spes_p2p.interop.weights import FORMAT
from spes_p2p.observe.events import Eval, Round
from spes_p2p.observe.sinks import METRICS_FILE, JsonLines
from spes_p2p.peer import fetching
from spes_p2p.peer.export import ExportOptions, Report, Say, facts_of_run, run_export
from spes_p2p.peer.fetching import Fetched, fetch_newest
from spes_p2p.peer.options import JoinTarget
from spes_p2p.state.staging import Staging
from spes_p2p.state.store import StateStore
from spes_p2p.state.version import Version
from spes_p2p.swarm.records import RUNS_KEY, PeerRecord, RunRecord, heads_key, peers_key
from spes_p2p.swarm.stream_server import StreamLimits
from spes_p2p.sync.announce import head_record
from spes_p2p.wire import pack
from tests.interop.states import OLMOE, layout_of, model_of, random_state, run_config
from tests.model.tiny import tiny_tokens
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import in_swarm, small_config

MANY = ("model.vocab_size=8192", "model.embedding_rows=8192", "sync.tile_values=4096")
"""Many tiles."""
ADDRESSES = ("/ip4/203.0.113.7/tcp/31337",)


def saved(
    folder: Path, config: Config, step: int = 140, tokenizer: str | None = None, eos_id: int | None = None
) -> Path:
    """The output folder of a peer with one checkpoint."""
    store = StateStore(folder / "run" / "state", layout_of(config))
    state = random_state(config)[1]
    version = store.create_initial(lambda tile: state.block(tile.block)[tile.start : tile.stop], 7)
    run = {"run_id": "a-run", "fingerprint": "ab" * 32, "config": published_yaml(config), "tokens": 999}
    save_checkpoint(folder / "checkpoints", version, step, {}, run | {"tokenizer": tokenizer, "eos_id": eos_id}, 3)
    store.close()
    return folder


def test_from_a_peers_folder_or_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(**OLMOE, vocab_size=257)
    peer = saved(tmp_path / "peer", config, tokenizer="byte")
    metrics = JsonLines(peer / METRICS_FILE)
    for number in (7, 8):
        metrics.write(0.0, Round(number, 140, 3, "committed", 10, 0, 0, {}, ""))
        metrics.write(0.0, Eval(number, 140, 10.25 - number, 64))
    metrics.close()
    said: list[str] = []
    told: list[tuple[str, int, int]] = []
    for source in (peer, peer / "checkpoints", peer / "checkpoints" / "step-00000140"):
        output = tmp_path / f"out-{source.name}"
        facts = run_export(
            ExportOptions(output, source), said.append, lambda what, done, total: told.append((what, done, total))
        )
        assert (facts.round, facts.step, facts.tokens, facts.run_id) == (7, 140, 999, "a-run")
        assert (facts.peers, facts.held_out) == (3, HeldOut(7, 3.25))  # the round after it is not in it
        theirs = AutoModelForCausalLM.from_pretrained(output)
        tokens = tiny_tokens()
        with torch.no_grad():
            want = model_of(config, random_state(config)[1]).logits(tokens)
            assert (theirs.eval()(tokens).logits - want).abs().max() < 1e-4
        assert (output / "tokenizer.json").is_file()
    assert said == []
    monkeypatch.chdir(peer / "checkpoints")
    for number, source in enumerate((Path(), Path("step-00000140"))):
        facts = run_export(ExportOptions(tmp_path / f"here-{number}", source), said.append)
        assert facts.held_out == HeldOut(7, 3.25)
    assert told[-1][0] == "export"
    assert told[-1][1] == told[-1][2] > 0


def test_a_checkpoint_of_an_older_version_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config names fields that are gone since, at their defaults."""
    older = (Path(__file__).parents[1] / "config" / "published_by_cd602221.yaml").read_text()
    monkeypatch.setattr("tests.peer.test_export.published_yaml", lambda config: older)
    peer = saved(tmp_path / "peer", published_config(older, "the run's"), tokenizer="byte")
    facts = run_export(ExportOptions(tmp_path / "out", peer), lambda text: None)
    assert (facts.step, facts.config.model.num_experts) == (140, 8)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_experts == 8


def test_the_momentum_of_an_outer_optimizer_stays_behind(tmp_path: Path) -> None:
    config = run_config(**OLMOE)
    stepped = config.model_copy(update={"sync": config.sync.model_copy(update={"outer": "nesterov"})})
    outputs = []
    for name, one in (("plain", config), ("stepped", stepped)):
        outputs.append(tmp_path / f"{name}-out")
        run_export(ExportOptions(outputs[-1], saved(tmp_path / name, one)), lambda text: None)
    weights = [(output / "model.safetensors").read_bytes() for output in outputs]
    assert weights[0] == weights[1]


def test_without_a_known_tokenizer_it_says_so(tmp_path: Path) -> None:
    peer, said = saved(tmp_path / "peer", run_config(**OLMOE)), list[str]()
    run_export(ExportOptions(tmp_path / "out", peer), said.append)
    assert "--tokenizer" in said[0]
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def with_data(**data: str) -> Config:
    config = run_config(**OLMOE, vocab_size=257)
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def test_the_tokenizer_that_the_run_names_goes_along(tmp_path: Path) -> None:
    """A peer that gets its data from others knows it from the run alone."""
    config = with_data(tokenizer="byte", tokenizer_hash=ByteTokenizer.fingerprint)
    said = list[str]()
    run_export(ExportOptions(tmp_path / "out", saved(tmp_path / "peer", config)), said.append)
    assert said == []
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"] == [97, 98]


@pytest.mark.parametrize("known_by", ["data", "run", "document_end"])
def test_what_ended_the_documents_ends_what_the_model_writes(known_by: str, tmp_path: Path) -> None:
    """`tokenize --eos-token` may have named another token than the tokenizer's own, which may have none at all."""
    from tokenizers import Tokenizer, models

    for name, words in (("two", {"</s>": 0, "a": 1, "<turn>": 2}), ("none", {"a": 1, "<turn>": 2})):
        path = tmp_path / f"{name}.json"
        Tokenizer(models.WordLevel(words, unk_token="a")).save(str(path))
        config = run_config(**OLMOE, vocab_size=257, document_end=2 if known_by == "document_end" else None)
        if known_by == "run":
            config = config.model_copy(update={"data": config.data.model_copy(update={"eos_id": 2})})
        peer = saved(tmp_path / name, config, tokenizer=str(path), eos_id=2 if known_by == "data" else None)
        for given in (None, str(path)):
            output = tmp_path / f"{name}-{given is None}"
            run_export(ExportOptions(output, peer, tokenizer=given), lambda text: None)
            assert AutoTokenizer.from_pretrained(output).eos_token == "<turn>"
            assert GenerationConfig.from_pretrained(output).eos_token_id == 2


def test_a_tokenizer_that_names_no_end_is_refused_before_a_run_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    asked = list[int | None]()

    def fetch(run: JoinTarget, folder: Path, say: Say, report: Report, check: Callable[[Config], None]) -> Fetched:
        config = run_config(**OLMOE, vocab_size=257)
        for end in (0, None):  # a run that says it, and one that does not
            check(config.model_copy(update={"data": config.data.model_copy(update={"eos_id": end})}))
            asked.append(end)
        raise AssertionError("nothing is fetched of the second")

    monkeypatch.setattr("spes_p2p.peer.export.fetch_over_network", fetch)
    with pytest.raises(DataError, match="does not say which token ends a text"):
        run_export(ExportOptions(tmp_path / "out", None, tokenizer=str(path)), lambda text: None)
    assert asked == [0]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"vocab_size": 19}, "has 257 ids, but model.vocab_size is 19"),
        ({"vocab_size": 257, "head_dim": 8}, "which OLMoE cannot express"),
    ],
)
def test_what_no_export_can_come_of_is_refused_before_a_run_is_fetched(
    model: dict[str, int], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(run: JoinTarget, folder: Path, say: Say, report: Report, check: Callable[[Config], None]) -> Fetched:
        check(run_config(**OLMOE | model))
        raise AssertionError("it is fetched")

    monkeypatch.setattr("spes_p2p.peer.export.fetch_over_network", fetch)
    with pytest.raises(ConfigError, match=words):
        run_export(ExportOptions(tmp_path / "out", None, tokenizer="byte"), lambda text: None)


def test_a_run_whose_config_is_refused_is_not_fetched(tmp_path: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await announce(swarm, "abc")

        def refuse(config: Config) -> None:
            raise DataError(f"no tokenizer for {config.run.run_id}")

        with pytest.raises(DataError, match="no tokenizer for"):
            await fetch_newest(swarm.network.peer("reader"), tmp_path / "reader", check=refuse)
        assert not (tmp_path / "reader").exists()

    in_swarm(tmp_path / "swarm", play)


def test_another_tokenizer_than_that_of_the_data_is_told(tmp_path: Path) -> None:
    peer, said = saved(tmp_path / "peer", with_data(tokenizer_hash="ab" * 32)), list[str]()
    run_export(ExportOptions(tmp_path / "none", peer), said.append)
    words = "add the one of the run's data (its hash begins with abababababababab) with --tokenizer"
    assert said[0].endswith(words)
    run_export(ExportOptions(tmp_path / "byte", peer, tokenizer="byte"), said.append)
    assert said[1].startswith("warning: tokenizer 'byte' differs from the one of the run's data")
    assert (tmp_path / "byte" / "tokenizer.json").is_file()


def test_a_path_that_somebody_published_is_not_opened_and_a_lost_file_is_no_end(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    published = saved(tmp_path / "published", with_data(tokenizer=str(path)))
    with pytest.raises(ConfigError, match=r"data\.tokenizer is "):
        run_export(ExportOptions(tmp_path / "out", published), lambda text: None)
    said = list[str]()
    lost = saved(tmp_path / "lost", with_data(), tokenizer="/of/another/machine.json")
    run_export(ExportOptions(tmp_path / "again", lost), said.append)
    assert "/of/another/machine.json' cannot be loaded: the file does not exist; add the one" in said[0]


@pytest.mark.parametrize("name", ["mine", "me/mine"])
def test_a_tokenizer_that_a_run_names_is_not_what_has_this_name_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "here" / name
    own.mkdir(parents=True)
    byte_level().save(str(own / "tokenizer.json"))
    monkeypatch.chdir(tmp_path / "here")
    said = list[str]()
    run_export(ExportOptions(tmp_path / "out", saved(tmp_path / "peer", with_data(tokenizer=name))), said.append)
    assert f"the run names {name!r}, and a file or folder here has this name" in said[0]
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path) -> None:
    peer = saved(tmp_path / "peer", run_config(**OLMOE))
    block = peer / "checkpoints" / "step-00000140" / "state" / "block-00001.f32"
    data = bytearray(block.read_bytes())
    data[5] ^= 1
    block.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"block-00001.f32 is damaged"):
        run_export(ExportOptions(tmp_path / "out", peer), lambda text: None)
    with pytest.raises(ConfigError, match="there is no folder"):
        run_export(ExportOptions(tmp_path / "out", tmp_path / "nowhere"), lambda text: None)
    assert [path.name for path in tmp_path.iterdir()] == ["peer"]


async def announce(swarm: MemorySwarm, names: Iterable[str], with_head: bool = True) -> None:
    """What peers put into the DHT: the run, themselves, and their newest commit."""
    info = swarm.info
    for name in names:
        peer, directory = swarm.peers[PeerId(name)], swarm.network.peer(name).directory
        records: dict[str, object] = {
            RUNS_KEY: RunRecord(
                info.run_id, info.fingerprint, info.organiser, WIRE_VERSION, peer.round, b"", ADDRESSES
            ),
            peers_key(info.run_id): PeerRecord(
                info.run_id, PeerId(name), (), "0.1.0", peer.round, 1, 1, 1.0, (), "peer", False, 1, 1
            ),
        }
        if with_head and peer.chain.newest is not None:
            records[heads_key(info.run_id)] = head_record(peer.chain.newest, 1)
        for key, record in records.items():
            await directory.publish(key, pack(record), 60.0)


async def fetch(
    swarm: MemorySwarm, folder: Path, report: Callable[[int, int], None] = lambda done, total: None
) -> Fetched:
    """As somebody who is no peer of the run."""
    reader = swarm.network.peer("reader")
    return await fetch_newest(reader, folder, report=report)


def test_the_newest_state_of_a_live_run_is_fetched_and_exported(tmp_path: Path) -> None:
    async def play(swarm: MemorySwarm) -> Facts:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(3)
        await swarm.peers[PeerId("c")].leave()
        await swarm.until_round(swarm.peers[PeerId("a")].round + 2, "ab")
        await announce(swarm, "ab")
        fetched = await fetch(swarm, tmp_path / "reader")
        manifest = fetched.commit.manifest
        assert (fetched.peers, len(manifest.roster)) == (3, 2)
        assert manifest.round >= 3
        fetched.version.verify()
        assert fetched.version.root == manifest.state_root
        store = swarm.peers[PeerId("a")].store
        if manifest.round in store.rounds():
            assert store.version(manifest.round).root == fetched.version.root
        facts = facts_of_run(fetched)
        (tmp_path / "model").mkdir()
        export_model(fetched.version, facts, tmp_path / "model", FORMAT, None)
        return facts

    facts = in_swarm(tmp_path / "swarm", play)
    assert facts.tokens
    assert facts.peers == 3
    assert facts.config.model == small_config().model
    version = Version(tmp_path / "reader" / "state" / f"round-{facts.round:08d}", facts.round, layout_of(facts.config))
    theirs, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tiny_tokens()
    with torch.no_grad():
        assert (theirs.eval()(tokens).logits - model_of(facts.config, version).logits(tokens)).abs().max() < 1e-4


def test_a_run_that_goes_on_meanwhile_is_followed(tmp_path: Path) -> None:
    """The state that was found is gone when its tiles are asked for: what changed since is fetched instead."""

    async def play(swarm: MemorySwarm) -> tuple[int, int]:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        await announce(swarm, "abc")
        stale = swarm.peers[PeerId("a")].round
        await swarm.until_round(stale + 3)  # the records still say `stale`
        fetched = await fetch(swarm, tmp_path / "reader")
        fetched.version.verify()
        return stale, fetched.commit.manifest.round

    stale, found = in_swarm(tmp_path / "swarm", play)
    assert found >= stale + 3


async def begun_with_a_slow_reader(swarm: MemorySwarm) -> int:
    """The round of a swarm of three; what they have takes `reader` 15 s to fetch."""
    await swarm.start(["a", "b", "c"])
    await swarm.until_round(3)
    await announce(swarm, "abc")
    size = 4 * swarm.layout.num_values
    swarm.network.peer("reader", StreamLimits(download_bytes_per_second=size / 15.0))
    return swarm.peers[PeerId("a")].round


def test_a_download_that_takes_many_rounds_gets_the_state_that_it_began_with(tmp_path: Path) -> None:
    """Donors keep it until it is here."""

    async def play(swarm: MemorySwarm) -> tuple[int, int, int]:
        begun = await begun_with_a_slow_reader(swarm)
        started = swarm.clock.now()
        fetched = await fetch(swarm, tmp_path / "reader")
        assert swarm.clock.now() - started < 15.0 / 0.8, "four fifths of the link, from three donors that go on"
        fetched.version.verify()
        return begun, fetched.commit.manifest.round, swarm.peers[PeerId("a")].round

    begun, found, newest = in_swarm(tmp_path / "swarm", play, small_config(*MANY))
    assert found <= begun + 1
    assert newest > found + 5


def test_a_download_goes_on_as_long_as_tiles_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the line at a donor is long, a fetch is given up now and then, also while it writes to the disk."""
    told: list[float] = []

    async def fill_some(staging: Staging, wanted: Mapping[int, Hash], *rest: Any) -> None:
        missing = {at: name for at, name in wanted.items() if not staging.has(at)}
        some = dict(list(missing.items())[: max(1, len(wanted) // 10)])
        is_last = len(some) == len(missing)
        await fill_state(staging, some, *(rest if is_last else rest[:-1]))  # without a report
        if not is_last:
            raise NetworkError("the others did not come in time")

    async def play(swarm: MemorySwarm) -> tuple[int, int, int]:
        begun = await begun_with_a_slow_reader(swarm)
        fetched = await fetch(swarm, tmp_path / "reader", lambda done, total: told.append(done / total))
        fetched.version.verify()
        return begun, fetched.commit.manifest.round, swarm.peers[PeerId("a")].round

    monkeypatch.setattr(fetching, "fill_state", fill_some)
    begun, found, newest = in_swarm(tmp_path / "swarm", play, small_config(*MANY))
    assert found <= begun + 1
    assert newest > found
    assert told[-1] == 1.0


def test_who_says_more_than_it_proves_does_not_hide_the_newest_state(tmp_path: Path) -> None:
    async def play(swarm: MemorySwarm) -> tuple[int, int]:
        await swarm.start(["a", "b", "c"])
        await swarm.until_round(2)
        await announce(swarm, "abc")
        commit = swarm.peers[PeerId("c")].chain.newest
        assert commit is not None
        boast = dataclasses.replace(head_record(commit, 1), round=10**6, certificate=b"", manifest=b"")
        key = heads_key(swarm.info.run_id)
        await swarm.network.peer("c").directory.publish(key, pack(boast), 60.0)
        fetched = await fetch(swarm, tmp_path / "reader")
        return swarm.peers[PeerId("a")].round, fetched.commit.manifest.round

    newest, found = in_swarm(tmp_path / "swarm", play)
    assert found >= newest - 1


def test_nobody_to_fetch_from_is_one_error(tmp_path: Path) -> None:
    async def play(swarm: MemorySwarm) -> None:
        await swarm.start(["a", "b", "c"])
        await announce(swarm, "abc", with_head=False)
        with pytest.raises(NetworkError, match="has not begun"):
            await fetch(swarm, tmp_path / "reader")

    in_swarm(tmp_path / "swarm", play)
