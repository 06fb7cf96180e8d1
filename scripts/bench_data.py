"""How fast text becomes tokens and tokens become batches, beside plain loops over the same data in the same run.

    python scripts/bench_data.py [--data DIR] [--tokenizer FILE] [--processes N] [--repeats R]

DIR holds corpus/*.jsonl.gz with a field "text", and perhaps tokenizer/tokenizer.json (default: $SPES_DATA_DIR, else
the standard library's sources). The references: one process that reads, parses, encodes one document at a time and
saves one array; and for the loader the same sequences sliced out of an array in memory.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.loader import LeasedLoader
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.memmap import count_sequences
from spes_p2p.data.order import Order
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.data.tokenizers import load_tokenizer

BATCH_SEQUENCES = 64
SEQUENCE_LENGTH = 512


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files, tokenizer = _inputs(arguments, folder)
        text_bytes = sum(len(text.encode()) for path in files for text in _texts(path))
        print(f"{len(files)} files, {text_bytes / 1e6:.1f} MB of text, {os.cpu_count()} cores")
        print(f"{'what':44} {'tokens/s':>12} {'plain loop':>12} {'ratio':>6}")
        for spec in ["byte", *([str(tokenizer)] if tokenizer else [])]:
            for processes in sorted({1, arguments.processes}):
                _tokenizing(files, spec, processes, folder, arguments.repeats)
        for mask in (False, True):
            _loading(folder, mask, arguments.repeats)


def _tokenizing(files: list[Path], spec: str, processes: int, folder: Path, repeats: int) -> None:
    """Both are timed in turn, so that other load on the machine meets both; the best of each counts."""
    options = TokenizeOptions(tokenizer=spec, processes=processes)
    patterns = [str(path) for path in files]
    ours, plain, tokens = [], [], 0
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=folder) as output:
            plain.append(_seconds(partial(_plain_loop, files, spec, Path(output, "plain.npy"))))
            ours.append(_seconds(partial(tokenize, patterns, Path(output, "ours"), options)))
            tokens = len(np.load(Path(output, "plain.npy")))
            found = Dataset.open(Path(output, "ours")).tokens
        if found != tokens:
            raise SystemExit(f"tokenize gave {found} tokens, the plain loop {tokens}")
    label = f"tokenize, {'byte' if spec == 'byte' else 'tokenizer.json'}, {processes} process(es)"
    _line(label, tokens / min(ours), tokens / min(plain))


def _plain_loop(files: list[Path], spec: str, target: Path) -> None:
    tokenizer = load_tokenizer(spec)
    ids: list[np.ndarray] = []
    for path in files:
        for text in _texts(path):
            ids += [*tokenizer.encode([text]), np.array([tokenizer.eos_id], np.uint32)]
    np.save(target, np.concatenate(ids).astype(np.uint16))


def _loading(folder: Path, mask: bool, repeats: int) -> None:
    """One epoch of batches of a byte-level dataset against slices of the same tokens in memory, in the same order."""
    tokens = np.random.default_rng(0).integers(0, 256, 8_000_000, dtype=np.uint16)
    (folder / "raw").write_bytes(tokens.tobytes())
    (folder / "paths.txt").write_text("raw\n")
    settings = {"data.sequence_length": SEQUENCE_LENGTH, "data.mask_repetitions": str(mask).lower()}
    config = load_config(bundled_config("tiny"), [f"{key}={value}" for key, value in settings.items()])
    dataset = Dataset.open(folder / "paths.txt", "uint16")
    training = count_sequences(dataset.tokens, SEQUENCE_LENGTH, config.data.held_out_fraction)[0]
    batches = training // BATCH_SEQUENCES

    def ours() -> None:
        loader = LeasedLoader(dataset, config, ((0, batches * BATCH_SEQUENCES),))
        for _ in range(batches):
            loader.next_batch(BATCH_SEQUENCES)

    rows = tokens[: len(tokens) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].reshape(-1, SEQUENCE_LENGTH)
    order = Order(training, 0).sequences_at(np.arange(training))

    def plain() -> None:
        for index in range(batches):
            rows[order[index * BATCH_SEQUENCES : (index + 1) * BATCH_SEQUENCES]].astype(np.int64)

    count = batches * BATCH_SEQUENCES * SEQUENCE_LENGTH
    speeds = [[count / _seconds(run) for run in (ours, plain)] for _ in range(repeats)]
    _line(f"loader{', repetitions masked' if mask else ''}", *(max(column) for column in zip(*speeds, strict=True)))


def _texts(path: Path) -> list[str]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        return [json.loads(line)["text"] for line in lines]


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _line(label: str, ours: float, plain: float) -> None:
    print(f"{label:44} {ours:12,.0f} {plain:12,.0f} {ours / plain:6.2f}", flush=True)


def _inputs(arguments: argparse.Namespace, folder: Path) -> tuple[list[Path], Path | None]:
    tokenizer = arguments.tokenizer
    if arguments.data is None:
        return build_stdlib_corpus(folder / "corpus"), tokenizer
    files = sorted(arguments.data.glob("corpus/*.jsonl.gz"))
    if not files:
        raise SystemExit(f"no corpus/*.jsonl.gz in {arguments.data}")
    beside = arguments.data / "tokenizer" / "tokenizer.json"
    return files, tokenizer or (beside if beside.is_file() else None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = os.environ.get("SPES_DATA_DIR")
    parser.add_argument("--data", type=Path, default=Path(data) if data else None)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process, in the plain loop too
    main()
