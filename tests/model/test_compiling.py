"""What can be compiled is; what cannot runs as it is, and says why once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spes_p2p.model import compiling
from spes_p2p.model.compiling import Compiled, compiles_on
from tests.model.tiny import tiny_model, tiny_tokens


def test_auto_compiles_where_a_trial_works_on_cuda_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert compiles_on(cpu, True)
    assert not compiles_on(cpu, "auto")
    assert not compiles_on(cuda, False)
    monkeypatch.setattr(compiling, "why_not", lambda device, trial: "")
    assert compiles_on(cuda, "auto")
    monkeypatch.setattr(compiling, "why_not", lambda device, trial: "no gcc in PATH")
    assert not compiles_on(cuda, "auto")
    assert not compiles_on(cuda, "auto")
    assert caplog.text.count("torch.compile does not work here (no gcc in PATH)") == 1


def test_what_the_compiler_refuses_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise OSError("cannot find -lcuda")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **named: real(function, backend=broken, **named))
    plain, compiled = tiny_model(), tiny_model(torch_compile=True)
    assert torch.equal(plain(tiny_tokens()).total, compiled(tiny_tokens()).total)
    said = [record.getMessage() for record in caplog.records if record.name == compiling.logger.name]
    assert len(said) == 1
    assert "torch.compile does not work here (cannot find -lcuda)" in said[0]


def test_an_error_of_the_code_itself_passes() -> None:
    def full(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Compiled(torch.compiler.disable(full))(torch.ones(1))


def test_layers_share_one_graph_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **named: real(function, backend=counting, **named))
    torch._dynamo.reset()
    model = tiny_model(torch_compile=True)
    assert len(model.layers) > 1
    for _ in range(2):
        model(tiny_tokens()).total.backward()
    assert len(graphs) == 1
