"""Exported folders: loaded by transformers alone, with our logits, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from spes_p2p.config.load import config_from_text, published_yaml
from spes_p2p.config.schema import Config
from spes_p2p.data.tokenizers import ByteTokenizer, load_tokenizer
from spes_p2p.errors import ConfigError, StorageFull
from spes_p2p.interop.card import Facts
from spes_p2p.interop.export import export_model, filled_folder
from spes_p2p.interop.tokenizer import Publishable, byte_level
from spes_p2p.interop.weights import INDEX_FILE, SINGLE_FILE, Dtype, Format, PublishedWeights
from spes_p2p.state.layout import BlockSource
from tests.interop.states import LLAMA, OLMOE, QWEN2, QWEN3, random_state, run_config
from tests.model.tiny import tiny_tokens
from tests.state.small import file_size_limit

FAMILIES = [
    pytest.param(OLMOE, "OlmoeForCausalLM", id="olmoe"),
    pytest.param(QWEN3, "Qwen3MoeForCausalLM", id="qwen3"),
    pytest.param(QWEN2, "Qwen2MoeForCausalLM", id="qwen2"),
    pytest.param(LLAMA, "Qwen2MoeForCausalLM", id="llama"),
]


def facts_of(config: Config, **changes: Any) -> Facts:
    known: dict[str, Any] = {"tokens": 12_345, "round": 7, "step": 140}
    return Facts("a-run", "ab" * 32, "cd" * 32, config, **(known | changes))


def exported(
    folder: Path,
    config: Config,
    state: BlockSource,
    dtype: Dtype = "fp32",
    shard: int = 10**9,
    tokenizer: Publishable | None = None,
) -> Path:
    folder.mkdir(exist_ok=True)
    export_model(state, facts_of(config), folder, Format(dtype, shard), tokenizer)
    return folder


@pytest.mark.parametrize(("overrides", "family"), FAMILIES)
@pytest.mark.parametrize("shard", [10**9, 3000])
def test_transformers_computes_our_logits(overrides: dict[str, Any], family: str, shard: int, tmp_path: Path) -> None:
    config = run_config(**overrides)
    model, state = random_state(config)
    exported(tmp_path, config, state, shard=shard)
    assert (tmp_path / INDEX_FILE).exists() == (shard == 3000)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    theirs, info = loaded
    assert (type(theirs).__name__, theirs.dtype) == (family, torch.float32)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = tiny_tokens(2, 17)
    with torch.no_grad():
        want, got = model.logits(tokens)[..., : config.model.vocab_size], theirs.eval()(tokens).logits
    assert got.shape == want.shape  # rows beyond the vocabulary are gone
    assert got.abs().max() > 0.5
    assert (got - want).abs().max() < 1e-4


def test_what_was_trained_with_document_masks_is_exported_as_any_other(tmp_path: Path) -> None:
    """Transformers computes each document alone as we do in the midst of others."""
    config = run_config(**OLMOE, document_end=18)
    model, state = random_state(config)
    theirs = AutoModelForCausalLM.from_pretrained(exported(tmp_path, config, state)).eval()
    tokens = tiny_tokens(1, 17) % 18
    tokens[0, [4, 9]] = 18
    with torch.no_grad():
        want = model.logits(tokens)[0, 5:10, : config.model.vocab_size]
        got = theirs(tokens[:, 5:10]).logits[0]
    assert (got - want).abs().max() < 1e-4


def test_files_keep_to_their_size_and_are_all_indexed(tmp_path: Path) -> None:
    config = run_config(**OLMOE)
    exported(tmp_path, config, random_state(config)[1], shard=3000)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    with PublishedWeights.open(tmp_path) as weights:
        assert weights.names == set(index["weight_map"])
        sizes = {name: 4 * int(np.prod(weights.shape(name))) for name in weights.names}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    for file in files:
        held = [sizes[name] for name, where in index["weight_map"].items() if where == file]
        assert sum(held) <= 3000 or len(held) == 1


@pytest.mark.parametrize(("dtype", "wanted"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_other_types_are_rounded_and_named(dtype: Dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    config = run_config(**QWEN3)
    model, state = random_state(config)
    exported(tmp_path, config, state, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == wanted
    head = model.head.weight.detach()[: config.model.vocab_size]
    assert torch.equal(theirs.lm_head.weight, head.to(wanted))


def test_the_byte_tokenizer_goes_along(tmp_path: Path) -> None:
    config = run_config(**OLMOE, vocab_size=257)
    exported(tmp_path, config, random_state(config)[1], tokenizer=Publishable("byte"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["a b\n\tc", "naïve “日本” \U0001f600", "\0\x7f\xa0\xad", " leading", ""]
    ours = ByteTokenizer().encode(texts)
    assert [tokenizer(text)["input_ids"] for text in texts] == [ids.tolist() for ids in ours]
    assert [tokenizer.decode(ids) for ids in ours] == texts
    assert (tokenizer.eos_token_id, len(tokenizer), tokenizer.model_max_length) == (256, 257, 32)
    assert AutoConfig.from_pretrained(tmp_path).eos_token_id == 256
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 256


def test_a_tokenizer_of_others_goes_along(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {"</s>": 0, "a": 1, "b": 2}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    for number, name in enumerate((tmp_path / "tokenizer.json", tmp_path)):
        config = run_config(**OLMOE)
        folder = exported(tmp_path / f"out-{number}", config, random_state(config)[1], tokenizer=Publishable(str(name)))
        again = AutoTokenizer.from_pretrained(folder)
        assert (again.get_vocab(), again.eos_token_id) == (words, 0)
    assert Publishable(str(tmp_path), eos_id=2).eos_id == 2
    small = run_config(**OLMOE, vocab_size=2)
    with pytest.raises(ConfigError, match=r"has 3 ids, but model.vocab_size is 2"):
        exported(tmp_path / "small", small, random_state(small)[1], tokenizer=Publishable(str(tmp_path)))


@pytest.mark.parametrize("own", [{}, {"pad_token": "<in no file>"}])
@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_the_tokenizer_of_a_folder_cuts_as_it_cut_the_data(name: str, own: dict[str, str], tmp_path: Path) -> None:
    """Of many a class AutoTokenizer builds another one from its words, without what the file does before."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    letters = byte_level().get_vocab(with_added_tokens=False)
    rust = Tokenizer(models.BPE(letters | {"12": len(letters), "<end>": len(letters) + 1}, [("1", "2")]))
    rust.normalizer = normalizers.Lowercase()
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    rust.save(str(tmp_path / "tokenizer.json"))
    about = {"tokenizer_class": name, "eos_token": "<end>", "bos_token": "1", "chat_template": "{{ messages }}"} | own
    settings = {"padding_side": "left", "truncation_side": "left", "model_input_names": ["input_ids"]}
    more = {"clean_up_tokenization_spaces": True, "additional_special_tokens": ["2"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**about, **settings, **more}))
    Publishable(str(tmp_path)).save(tmp_path / "out", 64)
    ours, again = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "IN 1234"
    assert again(text)["input_ids"] == ours.encode([text])[0].tolist()
    assert (again.eos_token_id, again.chat_template, again.model_max_length) == (257, "{{ messages }}", 64)
    assert again.bos_token == "1"  # a chat template may begin with it
    assert {key: getattr(again, key) for key in settings} == settings
    assert again.init_kwargs["clean_up_tokenization_spaces"]
    assert "2" in again.all_special_tokens
    assert max(again.get_vocab().values()) < ours.vocab_size == 258  # what the model has rows for


@pytest.mark.parametrize("kind", ["file", "bare", "config", "llama"])
def test_a_prompt_gets_no_tokens_that_the_data_was_cut_without(kind: str, tmp_path: Path) -> None:
    """Behind a prompt with an end the model would begin another text; and it has never seen a beginning."""
    from tokenizers import processors
    from transformers import LlamaTokenizer

    rust, source = byte_level(), tmp_path / "source"
    source.mkdir()
    rust.add_special_tokens(["<s>"])
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=[("<s>", 257), ("<|endoftext|>", 256)]
    )
    rust.save(str(source / "tokenizer.json"))
    if kind == "config":
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<s>"}
        (source / "tokenizer_config.json").write_text(json.dumps(about | {"add_bos_token": True}))
    if kind == "llama":
        words = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3, "a": 4, "b": 5}
        LlamaTokenizer(vocab=words, merges=[], add_bos_token=True, add_eos_token=True).save_pretrained(source)
        about = json.loads((source / "tokenizer_config.json").read_text())
        (source / "tokenizer_config.json").write_text(json.dumps(about | {"add_bos_token": True}))
    name = source / "tokenizer.json" if kind == "file" else source
    assert len(AutoTokenizer.from_pretrained(source)("ab")["input_ids"]) > 2
    Publishable(str(name)).save(tmp_path / "out", 64)
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("ab")["input_ids"] == load_tokenizer(str(name)).encode(["ab"])[0].tolist()
    assert again.decode(again("ab")["input_ids"]) == "ab"


def test_the_card_says_what_it_is(tmp_path: Path) -> None:
    config = run_config(**QWEN3)
    exported(tmp_path, config, random_state(config)[1])
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for fact in ("# a-run", "Qwen3MoeForCausalLM", "12,345", "ab" * 32, "cd" * 32, "num_experts: 8", "| 7, 140 |"):
        assert fact in card
    assert "path:" not in card  # nothing of the organiser's own machine
    text = card.split("```yaml\n")[1].split("```")[0]
    assert text.startswith("run:\n  run_id: ")
    assert "{" not in text
    assert published_yaml(config_from_text(text)) == published_yaml(config)


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    config = run_config(**OLMOE)
    target = tmp_path / "model"
    with pytest.raises(StorageFull, match="no room"), file_size_limit(2000), filled_folder(target) as folder:
        exported(folder, config, random_state(config)[1])
    assert list(tmp_path.iterdir()) == []
    with filled_folder(target) as folder:
        exported(folder, config, random_state(config)[1])
    assert (target / SINGLE_FILE).is_file()
    with pytest.raises(ConfigError, match="already exists"), filled_folder(target):
        pass
    assert (target / SINGLE_FILE).is_file()


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from spes_p2p.interop import export, hf
from spes_p2p.interop.card import Facts
from spes_p2p.interop.weights import Format
from spes_p2p.state.layout import Layout
from tests.interop.states import layout_of, run_config

torch.set_num_threads(1)
folder, shard, spare = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = run_config(d_model=256, num_heads=8, expert_ffn=512, num_layers=8, vocab_size=4000)
layout = Layout(hf.state_tensors(config.model), 2**20)

class Mapped:
    def block(self, index):
        return np.memmap(folder / str(index), np.float32, mode="r", shape=(layout.blocks[index].size,))

for block in layout.blocks:
    np.zeros(block.size, np.float32).tofile(folder / str(block.index))
hf.hf_config(config.model)  # imports what is needed
(folder / "warm").mkdir(); (folder / "out").mkdir()
small = run_config()
zeros = [np.zeros(block.size, np.float32) for block in layout_of(small).blocks]
def run(config, source, where, shard):
    facts = Facts("x", "", "", config, 0, 0, 0)
    export.export_model(source, facts, where, Format(sys.argv[4], shard), None)
class Held:
    def block(self, index):
        return zeros[index]
run(small, Held(), folder / "warm", 10**9)
data = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(data.split()[1]) + spare,) * 2)
run(config, Mapped(), folder / "out", shard)
total = sum(path.stat().st_size for path in (folder / "out").glob("*.safetensors"))
assert total > 2 * shard, (total, shard)
"""
SHARD = 24_000_000
TENSOR = 2**22
"""More than the greatest one takes."""


def run_with_memory(folder: Path, spare: int, dtype: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MEMORY, str(folder), str(SHARD), str(spare), dtype]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_memory_stays_below_two_files_and_a_tensor(dtype: str, tmp_path: Path) -> None:
    result = run_with_memory(tmp_path, 2 * SHARD + TENSOR, dtype)
    assert result.returncode == 0, result.stderr


def test_the_limit_on_memory_is_one(tmp_path: Path) -> None:
    """Else the test above would say nothing."""
    result = run_with_memory(tmp_path, SHARD // 2, "fp32")
    assert result.returncode != 0
    assert "memory" in result.stderr.lower()
