"""A run that starts from an upcycled model, with the installed program."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.interop.hf import state_tensors
from spes_p2p.interop.importing import StartModel
from spes_p2p.quickstart.processes import BOOTSTRAP, Host
from spes_p2p.state.layout import Layout
from spes_p2p.sync.chain import Chain
from tests.fork_server import ForkedSwarm
from tests.peer.real import ALONE, WAIT_SECONDS, make_tokens, quiet_port

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]


def test_bootstrap_starts_from_it_and_a_peer_gets_it_from_the_swarm(tmp_path: Path) -> None:
    shape = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "dense")
    data, start, file = make_tokens(tmp_path), tmp_path / "start", tmp_path / "run.yaml"
    with ForkedSwarm(tmp_path / "swarm", hosts={BOOTSTRAP: Host(port=quiet_port())}) as swarm:
        swarm.ask("upcycle", "--dense", str(tmp_path / "dense"), "--output", str(start), "--experts", "8")
        run = yaml.safe_load(bundled_config("tiny").read_text()) | yaml.safe_load((start / "model.yaml").read_text())
        file.write_text(yaml.safe_dump(run))
        others = [text for text in ALONE if not text.startswith("model.")]
        swarm.bootstrap(file, data, [*others, "--init-from", str(start)])
        node, config = swarm.processes["bootstrap"], load_config(file, others)
        root = StartModel.open(start).root(Layout(state_tensors(config.model), config.sync.tile_values))
        peer = swarm.peer("peer", data, ["--until-round", "1"])
        assert peer.wait(WAIT_SECONDS) == 0, peer.output()
        node.send(signal.SIGTERM)
        assert node.wait(30.0) == 0
        (start / "model.safetensors").unlink()  # the run has begun: it is not read again
        swarm.bootstrap(file, data, [*others, "--init-from", str(start)])
    genesis = Chain(peer.folder / "run" / "chain").commit(0).manifest
    assert genesis.state_root == root
    assert "fetching the state that the run starts from" in peer.output()
