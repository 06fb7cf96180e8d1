"""Whether expert columns make the committed model worse, tried on held-out text.

Honest training of one column alone need not make the model better: the column was trained together with shared weights
that are another's mean by now. But a small step along its change does, in the model that it began with: it leads down
the slope of the loss, on text that it was not trained on, too. So a column is harmful where it leads up the slope, and
not by chance. The slopes of all columns come from one backward pass a sequence. A step down may be far too long, and
where a column is seldom used the slope says little, but the next state may use it: so no change may be far longer than
those of other columns, and in the next state columns may not make the loss rise by much, all together or, where they
do, each alone.

The model goes through a layer at a time, on the CPU, so that little is held beside the trainer's own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spes_p2p.config.schema import Config, ModelConfig
from spes_p2p.consensus.probation import MOST_POSITIONS
from spes_p2p.consensus.weights import FEWEST
from spes_p2p.data.loader import AnyDataset, held_out_tokens
from spes_p2p.errors import DataNotReady
from spes_p2p.experts.stores import PARTS, Part
from spes_p2p.interop.hf import place_table
from spes_p2p.model.attention import Context, context_of
from spes_p2p.model.layers import embedded
from spes_p2p.model.params import ExpertPlace, load_layer, pieces_of_layer
from spes_p2p.model.transformer import Transformer
from spes_p2p.state.layout import BlockSource, Values

SURE = 3.0
"""Standard errors of the mean over sequences beyond which a rise is none by chance."""
IGNORED = 0.25
"""Times what a column usually makes the loss fall: a rise that is smaller hardly harms."""
LONGEST = 5.0
"""Times the median length of a change: what nothing is routed to now harms nobody now, and may in a later round."""
MUCH = 0.05
"""Of the loss: by no more may columns make that of the next state rise."""
FEWEST_SEQUENCES = 4
AT_ONCE = 16
"""Sequences that go through a layer together."""
Samples = NDArray[np.float64]
"""One number for each sequence [B]."""


class HeldOutJudge:
    """The `ColumnJudge` of a peer with a model of the run's own kind.

    Columns are often tried alone, because their values came late or again. What is usual is told from the others, too:
    from those in `new`, and from what was fit the last time that a column was tried.
    """

    def __init__(self, config: Config, dataset: AnyDataset) -> None:
        self._config = config
        self._dataset = dataset
        self._lengths: dict[int, float] = {}
        self._falls: dict[int, float] = {}

    def harmful(self, committed: BlockSource, new: Mapping[int, Values], columns: Collection[int]) -> frozenset[int]:
        """See `ColumnJudge`."""
        token_BS = self._held_out()
        if len(token_BS) < FEWEST_SEQUENCES:
            return frozenset()
        lengths = self._lengths | _lengths(committed, new)
        bounded = {
            column: new[1 + column] - committed.block(1 + column)
            for column in columns
            if lengths.get(column, 0.0) <= _longest(lengths.values())
        }
        trial = Trial(self._config.model, committed, token_BS)
        before, slopes = trial.slopes(bounded)
        falls = self._falls | {column: -float(slope.mean()) for column, slope in slopes.items()}
        least = IGNORED * max(0.0, float(np.median(list(falls.values())))) if falls else 0.0
        good = {column for column in bounded if not rises(slopes[column], least)}
        harmful = frozenset(columns) - self._fit_for(trial, float(before.mean()), new, frozenset(columns), good)
        for column in (column for column in columns if column not in harmful and lengths.get(column, 0.0)):
            self._lengths[column], self._falls[column] = lengths[column], falls[column]
        return harmful

    def _fit_for(
        self, trial: Trial, loss: float, new: Mapping[int, Values], columns: frozenset[int], good: set[int]
    ) -> frozenset[int]:
        """Those of the `good` columns that do not make the loss of the next state rise by much."""
        others = {block: values for block, values in new.items() if block - 1 not in columns}
        without = trial.losses(others)

        def does(some: Iterable[int]) -> bool:
            after = trial.losses({**others, **{1 + column: new[1 + column] for column in some}})
            return not np.isfinite(after).all() or rises(after - without, MUCH * loss)

        if not np.isfinite(without).all():  # it is none of these columns
            return frozenset(good)
        return frozenset(column for column in good if not does([column])) if good and does(good) else frozenset(good)

    def _held_out(self) -> Tensor:
        """The sequences [B, S] that all try columns on, without those that give no loss; none before they came."""
        try:
            found = held_out_tokens(self._dataset, self._config, self._config.sync.trial_sequences)
        except DataNotReady:
            return torch.empty(0, dtype=torch.long)
        return torch.from_numpy(found[:, :MOST_POSITIONS])


def rises(by: Samples, least: float) -> bool:
    """Whether the mean is more than `least`, which is not negative, and no mean of zero by chance."""
    error = float(by.std(ddof=1)) / math.sqrt(len(by))
    return bool(by.mean() > least and by.mean() > SURE * error)


def _lengths(committed: BlockSource, new: Mapping[int, Values]) -> dict[int, float]:
    """How long the change of each column is that changes; infinite where it is not finite, or too long for fp32."""
    changes = ((block - 1, values - committed.block(block)) for block, values in new.items() if block)
    found = {column: float(np.linalg.norm(change)) for column, change in changes}
    return {column: length if math.isfinite(length) else math.inf for column, length in found.items() if length}


def _longest(lengths: Collection[float]) -> float:
    """The longest that a change may be: of any finite length where too few are known to compare."""
    if len(lengths) < FEWEST:
        return sys.float_info.max
    return min(LONGEST * float(np.median(list(lengths))), sys.float_info.max)


class Trial:
    """A committed model, and what becomes of its losses on some text with other values in its columns."""

    def __init__(self, model: ModelConfig, committed: BlockSource, token_BS: Tensor) -> None:
        one_layer = {
            "num_layers": 1, "expert_backend": "auto", "foreign_dtype": "compute", "torch_compile": False,
            "activation_checkpointing": "none",
        }  # fmt: skip
        self._model = Transformer(model.model_copy(update=one_layer), range(model.num_experts), device="cpu")
        bank = self._model.banks[0]
        self._masters = {part: master for part in PARTS if (master := bank.master(part)) is not None}
        for parameter in self._model.parameters():
            parameter.requires_grad_(any(parameter is master for master in self._masters.values()))
        self._table, self._num_layers = place_table(model), model.num_layers
        self._committed, self._token_BS = committed, token_BS
        self._context = context_of(token_BS, self._model.config)

    @torch.no_grad()
    def losses(self, blocks: Mapping[int, Values]) -> Samples:
        """The cross entropy of each sequence [B] in nats, with other values in these blocks."""
        self._load(None, blocks)
        x_BSD = embedded(self._token_BS, self._model.embedding)
        parts = [slice(at, at + AT_ONCE) for at in range(0, len(x_BSD), AT_ONCE)]
        for layer in range(self._num_layers):
            self._load(layer, blocks)
            x_BSD = torch.cat([self._model.layers[0](x_BSD[p], _part_of(self._context, p))[0] for p in parts])
        return _samples(self._model.cross_entropies(x_BSD, self._token_BS))

    def slopes(self, changes: Mapping[int, Values]) -> tuple[Samples, dict[int, Samples]]:
        """The cross entropy of each sequence [B], and by how much it rises along each change, to first order."""
        self._load(None, {})
        with torch.no_grad():
            inputs = [embedded(self._token_BS, self._model.embedding)]
            for layer in range(self._num_layers):
                self._load(layer, {})
                inputs.append(self._model.layers[0](inputs[-1], self._context)[0])
        x_BSD = inputs.pop().requires_grad_()
        losses = self._model.cross_entropies(x_BSD, self._token_BS)
        [gradient_BSD] = torch.autograd.grad(losses.sum(), x_BSD)
        slope_BE = torch.zeros(len(losses), len(self._table) - 1, dtype=torch.float64)
        for layer in reversed(range(self._num_layers)):
            self._load(layer, {})
            change = self._changes_in(layer, changes)
            gradient_BSD = self._back(inputs.pop(), gradient_BSD, change, slope_BE)
        return _samples(losses), {column: slope_BE[:, column].numpy() for column in changes}

    def _back(self, x_BSD: Tensor, gradient_BSD: Tensor, change: Mapping[Part, Tensor], slope_BE: Tensor) -> Tensor:
        """The gradient of what goes into the layer at hand; adds what its experts give to the slopes."""
        found = []
        for at in range(len(x_BSD)):
            x_1SD = x_BSD[at : at + 1].clone().requires_grad_()
            out_1SD, _ = self._model.layers[0](x_1SD, _part_of(self._context, slice(at, at + 1)))
            wanted = (x_1SD, *self._masters.values())
            gradient_1SD, *of_masters = torch.autograd.grad(out_1SD, wanted, gradient_BSD[at : at + 1])
            for part, gradient in zip(self._masters, of_masters, strict=True):
                slope_BE[at] += (gradient * change[part]).flatten(1).sum(1, dtype=torch.float64)
            found.append(gradient_1SD)
        return torch.cat(found)

    def _changes_in(self, layer: int, changes: Mapping[int, Values]) -> dict[Part, Tensor]:
        """As the masters are, [E, out, in]."""
        found = {part: torch.zeros_like(master, requires_grad=False) for part, master in self._masters.items()}
        bank = self._model.banks[0]
        for column, change in changes.items():
            for where, start, stop in pieces_of_layer(self._model, self._table, layer, 1 + column):
                assert isinstance(where, ExpertPlace)
                part, rows = bank.rows_of(where.which)
                matrix = torch.from_numpy(change[start:stop]).view(bank.shape_of(where.which))
                found[part][bank.slot(where.expert), rows] = matrix
        return found

    def _load(self, layer: int | None, blocks: Mapping[int, Values]) -> None:
        """A layer of the committed model, or None for what is in no layer, with other values in these blocks."""
        for block in range(len(self._table)):
            values = blocks[block] if block in blocks else self._committed.block(block)
            load_layer(self._model, self._table, layer, block, values)


def _part_of(context: Context, part: slice) -> Context:
    """That of some sequences; what is the same for all has no dimension for them."""

    def one(values: Tensor) -> Tensor:
        return values[part] if values.dim() == 4 else values

    bias = context.bias_B1SS
    return Context(one(context.cos), one(context.sin), None if bias is None else one(bias))


def _samples(value_B: Tensor) -> Samples:
    found: Samples = value_B.detach().double().numpy()
    return found
