"""Task files for lm-evaluation-harness that tests make themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def write_task(folder: Path, name: str, data: Path) -> None:
    """A multiple-choice task over lines of {"query", "choices", "gold"}."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data))


def write_samples(file: Path, samples: Iterable[tuple[str, list[str], int]]) -> Path:
    lines = (json.dumps({"query": query, "choices": choices, "gold": gold}) for query, choices, gold in samples)
    file.write_text("".join(f"{line}\n" for line in lines))
    return file
