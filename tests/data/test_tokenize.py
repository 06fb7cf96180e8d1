"""Tokenize: every kind of file, the same bytes however it was run or interrupted, and errors that say what to do."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from spes_p2p.cli import tokenize as command
from spes_p2p.data import readers
from spes_p2p.data.encode import encoder
from spes_p2p.data.manifest import Dataset
from spes_p2p.data.tokenize import TokenizeOptions, TokenizeResult, tokenize
from spes_p2p.data.tokenizers import ByteTokenizer
from spes_p2p.errors import ConfigError, DataError, StorageFull
from tests.data.piece_makers import is_unaltered

ALONE = TokenizeOptions(processes=1, sequence_length=1)
TEXTS = ["first text", "zwei Öfen\n\nand more", "third"]


def documents(folder: Path) -> list[str]:
    """The texts of a byte-level dataset."""
    dataset = Dataset.open(folder)
    assert is_unaltered(dataset)
    tokens = np.concatenate([np.load(file.path) for file in dataset.files])
    assert tokens[-1] == 256
    ends = np.flatnonzero(tokens == 256)
    return [bytes(part[part < 256].astype(np.uint8)).decode() for part in np.split(tokens, ends)[:-1]]


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def zstd(data: bytes) -> bytes:
    import pyarrow

    compressed: bytes = pyarrow.compress(data, codec="zstd", asbytes=True)
    return compressed


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def parquet(path: Path, texts: list[str | None]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=2)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", lines(*TEXTS)),
        ("a.jsonl", b"\xef\xbb\xbf" + lines(*TEXTS).replace(b"\n", b"\n\n").rstrip()),
        ("a.json", lines(*TEXTS)),
        ("a.json", json.dumps([{"text": text} for text in TEXTS], indent=2).encode()),
        ("a.jsonl.gz", gzip.compress(lines(*TEXTS))),
        ("a.json.gz", gzip.compress(lines(*TEXTS[:1])) + gzip.compress(lines(*TEXTS[1:]))),
        ("a.jsonl.zst", zstd(lines(*TEXTS))),
        ("a.json.zst", zstd(lines(*TEXTS[:1])) + zstd(lines(*TEXTS[1:]))),
    ],
    ids=["lines", "lines with a byte order mark", "json lines", "json array", "gz", "gz gz", "zst", "zst zst"],
)
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    result = tokenize([str(tmp_path / "*.js*")], tmp_path / "out", ALONE)
    assert documents(tmp_path / "out") == TEXTS
    assert (result.manifest.documents, result.manifest.bad_lines) == (3, 0)
    assert result.manifest.tokens == sum(len(text.encode()) + 1 for text in TEXTS)


def test_parquet_and_single_objects_and_text_files(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", ["one", None, "two", "three"])
    (tmp_path / "b.json").write_text(json.dumps({"text": "four"}, indent=2))
    (tmp_path / "c.txt").write_bytes(b"five\nsix")
    result = tokenize([str(tmp_path)], tmp_path / "out", ALONE)
    assert documents(tmp_path / "out") == ["one", "two", "three", "four", "five\nsix"]
    assert result.examples == (f"{tmp_path}/a.parquet:2: 'text' is not a text but NoneType",)


def test_a_long_text_file_stays_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 16)
    data = b"".join(b"line %d\n" % number for number in range(20))
    (tmp_path / "a.txt").write_bytes(data[:-1] + b"\xff\nend")
    result = tokenize([str(tmp_path / "a.txt")], tmp_path / "out", ALONE)
    assert documents(tmp_path / "out") == [data.decode().replace("line 19\n", "end")]
    assert result.examples == (f"{tmp_path}/a.txt:20: invalid UTF-8 at byte 7",)


def test_bad_lines_are_counted_named_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = [b'{"text": 1}', b'{"other": ""}', b"[1]", b"{", b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"[" * 100_000]
    path.write_bytes(b"\n".join([lines("good").strip(), *bad, lines(*["fine"] * 6).strip(), b'{"text": ""}', b""]))
    result = tokenize([str(path)], tmp_path / "out", ALONE)
    assert documents(tmp_path / "out") == ["good", *["fine"] * 6]
    assert result.manifest.bad_lines == len(bad)
    assert [example.split(": ", 1)[0] for example in result.examples] == [f"{path}:{line}" for line in range(2, 9)]
    reasons = [example.split(": ", 1)[1] for example in result.examples]
    assert reasons[:3] == ["'text' is not a text but int", "no field 'text'", "a list instead of a JSON object"]
    assert reasons[3] == "invalid JSON at character 2"
    with pytest.raises(DataError, match=r"a.jsonl:2: 'text' is not a text but int"):
        tokenize([str(path)], tmp_path / "strict", replace(ALONE, strict=True))
    with pytest.raises(DataError, match=r"a.jsonl:2"):  # finished before, without --strict
        tokenize([str(path)], tmp_path / "out", replace(ALONE, strict=True))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for name in ("x", "y"):
        (folder / name).mkdir(parents=True)
        texts = [f"{name}{number} " * (number % 7) for number in range(60)]
        (folder / name / "same.jsonl").write_bytes(lines(*texts[:20]) + b"bad\n" + lines(*texts[20:]))
    (folder / "z.txt").write_text("z\n" * 200)
    return folder


SMALL = TokenizeOptions(processes=1, batch_size=5, max_shard_bytes=500)


def test_the_bytes_do_not_depend_on_processes_or_batches(corpus: Path, tmp_path: Path) -> None:
    ways = [SMALL, replace(SMALL, processes=2), replace(SMALL, batch_size=7), replace(SMALL, batch_size=10**6)]
    for index, options in enumerate(ways):
        tokenize([str(corpus / "**")], tmp_path / str(index), options)
    expected = content(tmp_path / "0")
    assert len(expected) > 10
    assert "same~2-00000.npy" in expected
    for index in range(1, len(ways)):
        assert content(tmp_path / str(index)) == expected


@pytest.mark.parametrize("batch_size", [5, 1, 60])
def test_an_interrupted_run_goes_on_with_the_same_bytes(corpus: Path, tmp_path: Path, batch_size: int) -> None:
    """Interrupted after every single batch, and continued with batches of another size."""
    tokenize([str(corpus)], tmp_path / "whole", SMALL)
    out = tmp_path / "out"

    def interrupt(done: int, total: int) -> None:
        assert 0 <= done <= total
        calls.append(done)
        if len(calls) == limit:
            raise KeyboardInterrupt

    result, limit = None, 0
    while result is None:
        calls: list[int] = []
        limit += 3
        try:
            result = tokenize([str(corpus)], out, replace(SMALL, batch_size=batch_size), interrupt)
        except KeyboardInterrupt:
            assert not list(out.glob("*.partial"))
            assert not (out / "manifest.json").exists()
    assert limit > 3
    assert content(out) == content(tmp_path / "whole")


def test_killed_workers_are_an_error_and_the_next_run_goes_on(corpus: Path, tmp_path: Path) -> None:
    many = replace(SMALL, processes=2, batch_size=1)

    def kill(done: int, total: int) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(DataError, match="a tokenizer process was killed"):
        tokenize([str(corpus)], tmp_path / "out", many, kill)
    tokenize([str(corpus)], tmp_path / "out", SMALL)
    tokenize([str(corpus)], tmp_path / "whole", SMALL)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_finished_files_are_skipped_and_changed_ones_done_again(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def again() -> TokenizeResult:
        return tokenize([str(corpus)], out, SMALL)

    first = again()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.npy")}
    second = again()
    assert (first.files_skipped, second.files_skipped) == (0, 3)
    assert second.manifest == first.manifest
    assert second.examples == first.examples
    (corpus / "z.txt").write_text("Z")
    (out / "same-00001.npy").unlink()
    assert again().files_skipped == 1
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.npy")}
    assert {name for name in after if name.startswith("z")} == {"z-00000.npy"}
    assert all(after[name] == before[name] for name in after if name.startswith("same~2"))
    assert is_unaltered(Dataset.open(out))


def test_another_corpus_or_other_settings_need_another_folder(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tokenize([str(corpus)], out, SMALL)
    with pytest.raises(DataError, match="max_shard_bytes 500, but now it is 600"):
        tokenize([str(corpus)], out, replace(SMALL, max_shard_bytes=600))
    with pytest.raises(DataError, match="also holds shards of 'same"):
        tokenize([str(corpus / "z.txt")], out, SMALL)


@pytest.mark.parametrize("inside", ["", "shards"])
def test_the_output_may_lie_among_the_input(inside: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*TEXTS))
    output = tmp_path / inside
    first = tokenize([str(tmp_path)], output, ALONE)
    again = tokenize([str(tmp_path)], output, ALONE)
    assert again.manifest == first.manifest
    assert documents(output) == TEXTS


def test_what_an_earlier_call_made_is_no_text(corpus: Path, tmp_path: Path) -> None:
    tokenize([str(corpus)], tmp_path / "shards", ALONE)
    with pytest.raises(DataError, match="shards holds no text, but what tokenize made"):
        tokenize([str(tmp_path / "shards")], tmp_path / "more", ALONE)
    assert not (tmp_path / "more").exists()


def test_data_that_was_copied_to_the_output_is_not_overwritten(tmp_path: Path) -> None:
    text, made, copied = tmp_path / "a.jsonl", tmp_path / "made", tmp_path / "copied"
    text.write_bytes(lines(*TEXTS))
    tokenize([str(text)], made, ALONE)
    copied.mkdir()
    for path in made.iterdir():
        if path.is_file():
            shutil.copy(path, copied)
    text.write_bytes(lines(*TEXTS[::-1]))
    with pytest.raises(DataError, match="was not written here by tokenize, and would be overwritten"):
        tokenize([str(text)], copied, ALONE)
    assert documents(copied) == TEXTS


def test_nothing_is_written_into_the_folder_of_a_peer(corpus: Path, tmp_path: Path) -> None:
    peer = tmp_path / "peer"
    peer.mkdir()
    (peer / "identity.key").touch()
    with pytest.raises(DataError, match="is the folder of a peer or of a bootstrap node"):
        tokenize([str(corpus)], peer, ALONE)
    assert [path.name for path in peer.iterdir()] == ["identity.key"]


def test_an_output_that_cannot_be_made_is_an_error_with_a_name(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of --output cannot be created: File name too long"):
        tokenize([str(corpus)], tmp_path / ("a" * 300), ALONE)


def test_text_that_is_called_as_the_manifest_is_not_overwritten(tmp_path: Path) -> None:
    text = tmp_path / "manifest.json"
    text.write_bytes(lines(*TEXTS))
    with pytest.raises(DataError, match="is part of the text, and would be overwritten"):
        tokenize([str(tmp_path)], tmp_path, ALONE)
    assert text.read_bytes() == lines(*TEXTS)
    tokenize([str(tmp_path)], tmp_path / "out", ALONE)
    assert documents(tmp_path / "out") == TEXTS


def test_a_file_counts_once_whatever_leads_to_it_and_links_to_folders_are_followed(tmp_path: Path) -> None:
    """Text that is there twice could be held out and trained on."""
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    (corpus / ".git").mkdir(parents=True)
    other.mkdir()
    (corpus / "a.jsonl").write_bytes(lines("one"))
    (corpus / "b.jsonl").symlink_to("a.jsonl")
    (corpus / ".git" / "c.json").write_bytes(lines("hidden"))
    (corpus / "._a.jsonl").write_bytes(b"what macOS leaves")
    (other / "d.txt").write_bytes(b"two")
    (corpus / "linked").symlink_to(other)
    (other / "ring").symlink_to(corpus)
    tokenize([str(corpus), str(other / ".." / "corpus" / "a.jsonl")], tmp_path / "out", ALONE)
    assert documents(tmp_path / "out") == ["one", "two"]


def test_files_of_one_name_are_numbered_beside_one_that_is_called_so(tmp_path: Path) -> None:
    for name in ("1/x.jsonl", "2/x.jsonl", "3/x~2.jsonl", "4/x.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(lines(name) if name.endswith("jsonl") else name.encode())
    tokenize([str(tmp_path / str(number)) for number in range(1, 5)], tmp_path / "out", ALONE)
    assert documents(tmp_path / "out") == ["1/x.jsonl", "2/x.jsonl", "3/x~2.jsonl", "4/x.txt"]


def test_two_runs_in_one_folder_are_kept_apart(corpus: Path, tmp_path: Path) -> None:
    def second(done: int, total: int) -> None:
        with pytest.raises(DataError, match="another tokenize is writing"):
            tokenize([str(corpus)], tmp_path / "out", SMALL)

    tokenize([str(corpus)], tmp_path / "out", SMALL, second)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl.gz", gzip.compress(os.urandom(2000))[:-400]),
        ("a.jsonl.gz", b"no gzip"),
        ("a.jsonl.zst", zstd(os.urandom(2000))[:-400]),
        ("a.jsonl.zst", b"no zstd"),
        ("a.parquet", b"no parquet"),
    ],
    ids=["cut gz", "no gz", "cut zst", "no zst", "no parquet"],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"{name} is damaged or cut short"):
        tokenize([str(tmp_path / name)], tmp_path / "out", ALONE)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_missing_library_comes_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).touch()
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)  # what a missing package looks like to import
    with pytest.raises(DataError, match="needs pyarrow, which is not installed") as caught:
        tokenize([str(tmp_path / name)], tmp_path / "out", ALONE)
    assert caught.value.fix == "install it with scripts/venv.sh data"


def test_nothing_to_read_is_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches"):
        tokenize([str(tmp_path / "*.jsonl")], tmp_path / "out", ALONE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"the folder {tmp_path}/empty has no file of a known kind") as caught:
        tokenize([str(tmp_path / "empty")], tmp_path / "out", ALONE)
    assert "known kinds of files are .jsonl" in caught.value.fix
    (tmp_path / "a.csv").touch()
    with pytest.raises(DataError, match=r"a.csv has none of the suffixes .jsonl"):
        tokenize([str(tmp_path / "a.csv")], tmp_path / "out", ALONE)
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match=r"1 of 1 are bad, such as .*a.jsonl:1: no field 'text'"):
        tokenize([str(tmp_path / "a.jsonl")], tmp_path / "out", ALONE)


def test_an_output_folder_that_cannot_be_made_is_named(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    for output in (tmp_path / "text.txt", Path("/proc/nope")):
        with pytest.raises(ConfigError, match=f"the folder {output} of --output cannot be created: ") as caught:
            tokenize([str(corpus)], output, ALONE)
        assert caught.value.fix == "choose another with --output"


def test_files_of_no_known_kind_are_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "text.md").write_text("text")
    with pytest.raises(DataError, match=r"text.md exists, but .md is not a known kind of file") as caught:
        tokenize([str(tmp_path / "docs")], tmp_path / "out", ALONE)
    assert caught.value.fix.startswith("rename it to .txt")
    (tmp_path / "docs" / "more.txt").write_text("text")
    assert readers.other_files([str(tmp_path / "docs"), str(tmp_path / "docs" / "more.txt")]) == [
        tmp_path / "docs" / "text.md"
    ]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", np.random.default_rng(0).bytes(5000), "of .* are bad, such as .*a.txt:1: "),
        ("a.txt", "two\nlines in UTF-16\n".encode("utf-16"), "3 of 3 are bad, such as .*zero byte"),
        ("a.txt", b"text\n" * 40 + b"\xff\n" * 41, "41 of 81 are bad, such as .*a.txt:41: invalid UTF-8"),
        ("a.jsonl", np.random.default_rng(0).bytes(5000), "of .* are bad, such as .*a.jsonl:"),
        ("a.jsonl", lines("x" * 500) + b"{}\n" * 2, "2 of 3 are bad, such as .*a.jsonl:2: no field 'text'"),
    ],
    ids=["bytes", "UTF-16", "half", "no JSON", "other fields"],
)
def test_a_file_that_is_not_text_is_refused(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    (tmp_path / "b.txt").write_text("good text\n" * 1000)
    for _ in range(2):  # and again where it goes on
        with pytest.raises(DataError, match=words) as caught:
            tokenize([str(tmp_path / "*.*")], tmp_path / "out", TokenizeOptions(processes=1))
        assert "leave the file out" in caught.value.fix
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".progress"]


def test_the_fix_of_a_file_that_is_not_text_names_all_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_bytes(lines("x" * 500) + b'{"body": ""}\n{"a": b}\n')
    with pytest.raises(DataError) as caught:
        tokenize([str(tmp_path / "few.jsonl")], tmp_path / "out", ALONE)
    assert caught.value.fix == (
        "name the field that holds the text with --text-field, correct the lines that are not JSON, "
        "or leave the file out"
    )


def test_what_was_made_of_a_refused_file_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*["x" * 90] * 9) + b"{}\n" * 20)
    (tmp_path / "b.txt").write_text("good text\n" * 50)
    with pytest.raises(DataError, match=r"a.jsonl has text in less than half of its lines: 20 of 29 are bad"):
        tokenize([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")], tmp_path / "out", SMALL)
    assert not list((tmp_path / "out").glob("a*"))
    tokenize([str(tmp_path / "b.txt")], tmp_path / "out", replace(SMALL, sequence_length=1))
    assert len(documents(tmp_path / "out")) == 1


def test_a_few_bad_lines_are_no_reason_to_refuse_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text\n" * 40 + b"\xff\n" * 39)
    assert tokenize([str(tmp_path / "*.*")], tmp_path / "out", ALONE).manifest.bad_lines == 39


def test_too_little_text_for_one_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="no text was found: every file is empty"):
        tokenize([str(tmp_path / "*.*")], tmp_path / "out", TokenizeOptions(processes=1))
    (tmp_path / "a.txt").write_text("thirty bytes of text, all told")
    with pytest.raises(DataError, match="the text gives 31 tokens, fewer than one sequence of 128") as caught:
        tokenize([str(tmp_path / "*.*")], tmp_path / "out", TokenizeOptions(processes=1))
    assert "--sequence-length" in caught.value.fix
    assert not (tmp_path / "out" / "manifest.json").exists()
    short = TokenizeOptions(processes=1, sequence_length=31)
    assert tokenize([str(tmp_path / "*.*")], tmp_path / "out", short).manifest.tokens == 31


@pytest.mark.parametrize("change", [{"processes": 0}, {"batch_size": 0}, {"max_shard_bytes": 129}])
def test_impossible_options_are_refused(corpus: Path, tmp_path: Path, change: dict[str, str | int]) -> None:
    with pytest.raises(ConfigError):
        tokenize([str(corpus)], tmp_path / "out", replace(ALONE, **change))  # type: ignore[arg-type]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses to let files grow beyond `size`, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_finished_shards_and_no_half_of_one(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (corpus / "x" / "same.jsonl").write_bytes(lines("x" * 100_000))
    big = replace(SMALL, max_shard_bytes=10**6)
    with largest_file(100_000), pytest.raises(StorageFull, match=r"same-00000.npy: no room for more"):
        tokenize([str(corpus)], out, big)
    assert not list(out.glob("*.npy*"))
    tokenize([str(corpus)], out, big)
    assert is_unaltered(Dataset.open(out))


def test_the_command_shows_bad_lines_and_a_summary(corpus: Path, tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(command.tokenize)
    arguments = [str(corpus / "**/*.jsonl"), "--output", str(tmp_path / "out"), "--processes", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"bad line {corpus}/x/same.jsonl:21: invalid JSON" in result.output
    assert "2 bad lines were left out" in result.output
    assert "documents in 2 shards; vocabulary 257 (byte)" in result.output


def test_the_data_package_needs_no_torch() -> None:
    imports = "from spes_p2p.data import leases, manifest, memmap, tokenize; import spes_p2p.cli.tokenize"
    subprocess.run([sys.executable, "-c", f"{imports}; import sys; assert 'torch' not in sys.modules"], check=True)


def test_urls_are_kept_in_the_manifest_and_change_nothing_else(corpus: Path, tmp_path: Path) -> None:
    """They may change later: what the dataset is, they do not say."""
    urls = ("https://example.org/shards", "hf://datasets/me/mine")
    for name, given in (("without", ()), ("with", urls)):
        tokenize([str(corpus)], tmp_path / name, replace(SMALL, urls=given))
    first, second = content(tmp_path / "without"), content(tmp_path / "with")
    assert [name for name in first if first[name] != second[name]] == ["manifest.json"]
    assert b"urls" not in first["manifest.json"]
    assert Dataset.open(tmp_path / "with").urls == urls
    with pytest.raises(ConfigError, match="contains a user name or a password") as caught:
        tokenize([str(corpus)], tmp_path / "with", replace(SMALL, urls=("https://me:secret@example.org",)))
    assert "secret" not in str(caught.value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_worker_never_hears_of_ctrl_c_not_even_while_it_starts() -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with encoder(2, ByteTokenizer(), "text", "uint16") as encode:
        wait = encode([readers.Record(1, "text")])
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
        (worker,) = multiprocessing.active_children()
        status = Path(f"/proc/{worker.pid}/status").read_text()
        assert wait().documents == 1
    mask = int(next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16)
    assert mask >> (signal.SIGINT - 1) & 1
