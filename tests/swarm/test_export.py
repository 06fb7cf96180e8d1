"""Exporting with the installed program: from the checkpoint of a peer, and from the run that it is in."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fork_server import ForkedSwarm
from tests.peer.real import ALONE, WAIT_SECONDS, make_tokens

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]


def test_a_live_run_and_a_checkpoint_give_the_same_model(tmp_path: Path) -> None:
    data, live, saved = make_tokens(tmp_path), tmp_path / "live", tmp_path / "saved"
    with ForkedSwarm(tmp_path / "swarm") as swarm:
        swarm.bootstrap("tiny", data, ALONE)
        peer = swarm.peer("peer", data)
        swarm.wait_for_round(1, ["peer"], WAIT_SECONDS)
        said = swarm.ask("export", "--initial-peers", swarm.address, "--output", str(live), "--tokenizer", "byte")
        peer.send(signal.SIGTERM)
        assert peer.wait(WAIT_SECONDS) == 0
        swarm.ask("export", "--checkpoint", str(peer.folder), "--output", str(saved), "--max-shard-size", "200kB")
    assert "round " in said
    assert not (live / "fetched").exists()
    assert "| training tokens |" in (saved / "README.md").read_text()
    assert re.search(r"\| held-out loss \| \d+\.\d{4} \(round \d+\) \|", (saved / "README.md").read_text())
    ids = torch.tensor([AutoTokenizer.from_pretrained(saved)("word7919 word15838")["input_ids"]])
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits for folder in (live, saved)]
    assert logits[0].shape == logits[1].shape
