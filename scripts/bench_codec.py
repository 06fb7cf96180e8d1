#!/usr/bin/env python3
"""What each codec does to a real change of weights: bytes, error, GB/s, beside hivemind's own codecs in the same run.

python scripts/bench_codec.py                      # changes of `tiny`, trained here for a round
python scripts/bench_codec.py --steps 100 --blocks # and other block sizes

A change is what one peer's inner steps did to the shared parameters and to its columns. `bytes` are of fp32's, in
percent. `error` is |x - x'| / |x| of one message, and, after the arrow, of the sum of --rounds messages where what each
leaves out is added to the next. GB/s count fp32 bytes in, or out, of one call on tiles of 2^20 values.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spes_p2p.codecs import sizes
from spes_p2p.codecs.lossy import decode, encode
from spes_p2p.codecs.sizes import CODECS, Codec
from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.data.corpus import build_stdlib_corpus
from spes_p2p.data.loader import LeasedLoader, open_dataset
from spes_p2p.data.tokenize import TokenizeOptions, tokenize
from spes_p2p.interop.hf import state_layout
from spes_p2p.state.initial import InitialState
from spes_p2p.train.trainer import Trainer

Values = NDArray[np.float32]
TILE = 2**20
BLOCKS: dict[Codec, tuple[int, ...]] = {
    "int8": (32, 64, 128, 256, 1024),
    "int4": (16, 32, 64, 128),
    "ternary": (64, 128, 256),
}


@dataclass(frozen=True)
class Coder:
    """One codec: values to bytes and back."""

    name: str
    encode: Callable[[Values], Any]
    decode: Callable[[Any, int], Values]
    size: Callable[[Any], int]


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {arguments.threads} threads")
    shared, column = trained_changes(arguments.steps)
    print(f"changes of {len(shared):,} shared values and {len(column):,} of columns in {arguments.steps} steps\n")
    print(f"{'codec':34}{'bytes':>8}{'error, shared':>20}{'error, columns':>20}{'encode':>9}{'decode':>9}  GB/s")
    for codec in CODECS[1:]:
        _row(ours(codec), shared, column, arguments.rounds)
    if arguments.blocks:
        for codec, blocks in BLOCKS.items():
            for block in blocks:
                with _block_size(codec, block):
                    _row(ours(codec, f"{codec}, {block} values a scale"), shared, column, arguments.rounds)
    for coder in theirs():
        try:
            _row(coder, shared, column, arguments.rounds)
        except Exception as error:  # noqa: BLE001 (another project's, whatever it is)
            print(f"{coder.name:34}does not run here: {str(error).splitlines()[0][:80]}")


def ours(codec: Codec, name: str = "") -> Coder:
    return Coder(name or codec, lambda x: encode(codec, x), lambda data, size: decode(codec, data, size), len)


def theirs() -> Iterator[Coder]:
    """hivemind's, which send a whole tensor."""
    from hivemind import compression

    for name in ("Float16Compression", "Uniform8BitQuantization", "Quantile8BitQuantization", "BlockwiseQuantization"):
        codec = getattr(compression, name)()

        def compress(x: Values, codec: Any = codec) -> Any:
            tensor = torch.from_numpy(x)
            return codec.compress(tensor, compression.CompressionInfo.from_tensor(tensor))

        def extract(data: Any, size: int, codec: Any = codec) -> Values:
            found: Values = codec.extract(data).float().numpy()
            return found

        yield Coder(f"hivemind {name}", compress, extract, lambda data: len(data.buffer))


def trained_changes(steps: int) -> tuple[Values, Values]:
    """What `steps` inner steps of `tiny` change: (shared, owned columns)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_stdlib_corpus(folder / "corpus.jsonl.gz", 4 * 10**6)
        tokenize([str(folder / "corpus.jsonl.gz")], folder / "tokens", TokenizeOptions())
        config = load_config(bundled_config("tiny"), [f"data.path={folder / 'tokens'}"])
        layout, owned = state_layout(config), tuple(range(config.swarm.experts_per_peer))
        trainer, initial = Trainer(config, layout, torch.device("cpu")), InitialState(layout, 0, config.model.init_std)
        size = config.optimizer.batch_sequences
        loader = LeasedLoader(open_dataset(config), config, ((0, 2 * steps * size),))
        trainer.adopt(owned, initial, 0)
        for _ in range(steps):  # past the first steps, which are like no others
            trainer.train_step(loader.next_batch(size))
        blocks = [0, *(1 + column for column in owned)]
        before = [trainer.contribution(block) for block in blocks]
        for _ in range(steps):
            trainer.train_step(loader.next_batch(size))
        changes = [trainer.contribution(block) - old for block, old in zip(blocks, before, strict=True)]
    return changes[0], np.concatenate(changes[1:])


def _row(coder: Coder, shared: Values, column: Values, rounds: int) -> None:
    errors = [_errors(coder, change, rounds) for change in (shared, column)]
    tile = np.resize(column, TILE)
    data = coder.encode(tile)
    share = 100 * coder.size(data) / tile.nbytes
    works = (lambda: coder.encode(tile), lambda: coder.decode(data, TILE))
    speeds = [tile.nbytes / _seconds(work) / 1e9 for work in works]
    shown = "".join(f"{one:>11.2%} ->{many:>6.2%}" for one, many in errors)
    print(f"{coder.name:34}{share:7.2f}%{shown}{speeds[0]:9.2f}{speeds[1]:9.2f}", flush=True)


def _errors(coder: Coder, change: Values, rounds: int) -> tuple[float, float]:
    """Relative error of one message, and of the mean of many that each carry what is left."""
    norm = float(np.linalg.norm(change))
    kept, total, first = np.zeros_like(change), np.zeros(len(change)), 0.0
    for at in range(rounds):
        wanted = change + kept
        arrives = np.asarray(coder.decode(coder.encode(wanted), len(change)), np.float32)
        kept = wanted - arrives
        total += arrives
        if at == 0:
            first = float(np.linalg.norm(kept)) / norm
    return first, float(np.linalg.norm(total / rounds - change)) / norm


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(7):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


@contextmanager
def _block_size(codec: Codec, block: int) -> Iterator[None]:
    usual = sizes.BLOCK_VALUES[codec]
    sizes.BLOCK_VALUES[codec] = block
    try:
        yield
    finally:
        sizes.BLOCK_VALUES[codec] = usual


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="inner steps of a round")
    parser.add_argument("--rounds", type=int, default=10, help="messages of which the errors are summed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", action="store_true", help="try other block sizes too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
