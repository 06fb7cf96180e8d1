"""A whole run in one process, cell by cell: python docs/api_example.py (a minute on two CPU cores)."""

# %% A corpus: some text of this Python, as bytes
import sys
from pathlib import Path
from tempfile import mkdtemp

import spes_p2p
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.observe.events import Round
from spes_p2p.observe.text import line

folder = Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp(prefix="spes-p2p-example-"))
files = build_stdlib_corpus(folder / "corpus", max_bytes=400_000)
tokenize([str(file) for file in files], folder / "tokens", TokenizeOptions(tokenizer="byte", processes=1))

# %% A run: the bundled config `tiny`, smaller still, and for one peer
small = (
    "model.d_model=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.expert_ffn=32",
    "data.sequence_length=64",
)
alone = ("swarm.min_peers=1", "swarm.experts_per_peer=8", "sync.steps_per_round=20")
run = spes_p2p.Run("tiny", *small, *alone)
print("fingerprint of the config:", run.fingerprint[:16])

# %% A bootstrap node and a peer that trains for two rounds
loopback = ("/ip4/127.0.0.1/tcp/0",)
with run.bootstrap(folder / "bootstrap", folder / "tokens", loopback) as address:
    peer = spes_p2p.Peer(address, folder / "peer", loopback, data=folder / "tokens", until_round=2, device="cpu")
    peer.train(lambda event: print(line(event)) if isinstance(event, Round) else None)
    report = spes_p2p.Swarm(address).status()
    print(f"run {report.run_id}: round {report.round}, step {report.step}, model {report.model_hash[:10]}")

# %% The model, with transformers alone
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from spes_p2p.peer.export import ExportOptions, run_export  # noqa: E402

run_export(ExportOptions(folder / "model", checkpoint=peer.folder), print)
model = AutoModelForCausalLM.from_pretrained(folder / "model")
tokenizer = AutoTokenizer.from_pretrained(folder / "model")
prompt = tokenizer("def ", return_tensors="pt")
print(repr(tokenizer.decode(model.generate(**prompt, max_new_tokens=20, do_sample=False)[0])))
