"""What an organiser is told of the data that is given to peers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.data.manifest import Manifest
from spes_p2p.peer.run_data import open_run_data
from tests.data.web_server import WebServer
from tests.peer.real import make_tokens


def test_an_organiser_is_told_of_files_that_a_list_names_outside_its_folder(tmp_path: Path) -> None:
    lists, said = tmp_path / "lists", list[str]()
    lists.mkdir()
    for path in (lists / "near.bin", tmp_path / "far.bin"):
        (np.arange(40_000) % 257).astype(np.uint16).tofile(path)
    (lists / "link.bin").symlink_to(tmp_path / "far.bin")
    for name in ("near.bin", "../far.bin", str(tmp_path / "far.bin"), "link.bin"):
        (lists / "paths.txt").write_text(f"near.bin\n{name}\n")
        config = load_config(bundled_config("tiny"), [f"data.path={lists / 'paths.txt'}"])
        asyncio.run(open_run_data(config, tmp_path / "node", None, said.append))
    notes = [line for line in said if line.startswith("note: ")]
    assert [line.rpartition(": ")[2] for line in notes] == [
        str(lists / name) for name in ("../far.bin", tmp_path / "far.bin", "link.bin")
    ]


def test_a_manifest_of_somebody_else_sends_nobody_to_this_machine(tmp_path: Path) -> None:
    """An organiser asks the addresses that it has typed, wherever they are; those of a manifest may be anybody's."""
    shards = make_tokens(tmp_path)
    with WebServer(shards) as server:
        path = shards / "manifest.json"
        replace(Manifest.read(path), urls=(server.url,)).write(shards)
        for overrides, asked in (((), False), ((f"data.urls={server.url}",), True)):
            config = load_config(bundled_config("tiny"), [f"data.path={shards}", *overrides])
            asyncio.run(open_run_data(config, tmp_path / "node", None, lambda text: None))
            assert bool(server.asked) == asked
