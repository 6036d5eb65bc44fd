"""Compositions and verdicts in the user's cache: taken for the same, and for nothing else."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.agent.authors.composer.join import Composition
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.fuse import kept, regions, verify
from coda_agent.fuse.kernels import chosen, kernel_of
from coda_agent.fuse.record import recorded
from tests.fuse.test_regions import D, H, drawn


class Card:
    """A GPU's device."""

    type = "cuda"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of what is kept; graphs of the CPU are taken for a GPU's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(regions, "_is_kept", lambda _: True)
    monkeypatch.setattr(regions, "_COMPOSED", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(verify, "_multiplication", lambda: "")
    return tmp_path / "coda-agent" / "regions"


def activated(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.linear(x, w))


def rounded(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, w))


def part(function: Callable[..., Tensor] = activated, rows: int = 24) -> torch.fx.Graph:
    return recorded(function, [drawn(rows, H), drawn(D, H)]).graph


def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Forget what this process knows; the graphs that are composed from here on."""
    compose, asked = regions.compose_graph, []
    monkeypatch.setattr(regions, "_COMPOSED", {})
    monkeypatch.setattr(regions, "compose_graph", lambda x: asked.append(x) or compose(x))
    return asked


def test_a_composition_is_read_again_with_ports_at_the_nodes_of_another_graph(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = regions.composed(part())
    asked, graph = forgotten(monkeypatch), part()
    other = regions.composed(graph)
    assert isinstance(one, Composition) and isinstance(other, Composition) and not asked
    assert kernel_of(one) == kernel_of(other) and one.rewritten == other.rewritten
    assert one.extents == other.extents == {"M": 24, "N": D, "K": H}
    assert [other.a.node, other.b.node] == graph.find_nodes(op="placeholder")
    (x,) = other.outputs.values()
    assert x.node in graph.nodes and x.steps == next(iter(one.outputs.values())).steps


def test_a_refusal_is_read_again_with_its_node(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = lambda x, w: F.linear(x, w).cumsum(-1)
    one = regions.composed(part(function))
    asked, graph = forgotten(monkeypatch), part(function)
    other = regions.composed(graph)
    assert isinstance(one, Refusal) and isinstance(other, Refusal) and not asked
    assert (other.message, other.hint, other.output) == (one.message, one.hint, one.output)
    assert one.node is not None and other.node in graph.nodes
    assert other.node is not None and other.node.name == one.node.name


@pytest.mark.parametrize("other", ["shape", "program", "torch", "sources", "broken"])
def test_a_composition_is_of_its_graph_and_the_versions(
    other: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions.composed(part())
    (file,) = cache.iterdir()
    kept_before, asked = file.read_bytes(), forgotten(monkeypatch)
    change(other, cache, monkeypatch)
    graph = part(rounded if other == "program" else activated, 40 if other == "shape" else 24)
    found = regions.composed(graph)
    assert asked == [graph] and isinstance(found, Composition)
    assert found.extents["M"] == (40 if other == "shape" else 24)
    assert (len([*cache.iterdir()]), file.read_bytes()) == (1 + (other != "broken"), kept_before)


def change(other: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if other == "torch":
        monkeypatch.setattr(kept, "version", lambda _: "another")
        monkeypatch.setattr(kept, "_toolchain", kept._toolchain.__wrapped__)
    if other == "sources":
        monkeypatch.setattr(kept, "_toolchain", lambda: ["other"])
    if other == "broken":
        for file in cache.iterdir():
            file.write_bytes(file.read_bytes()[:-9])


CHANGES = ["", "shape", "program", "torch", "sources", "card", "tile", "products", "broken"]


@pytest.mark.parametrize("other", CHANGES)
def test_numbers_are_compared_once_by_all_that_they_depend_on(
    other: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = Card()
    compared: list[str] = []
    said = lambda region, text, device: compared.append(text) or f"off by {len(compared)}"
    monkeypatch.setattr(verify, "fault", said)

    def known(graph: torch.fx.Graph) -> str:
        found, kernels = chosen(graph)
        (region,) = found.regions
        return verify.known_fault(region, kernels[region].text, device)

    assert known(part()) == known(part()) == "off by 1" and len(compared) == 1
    change(other, cache, monkeypatch)
    if other == "card":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    if other == "tile":  # an accepted kernel's, of another table
        another = SimpleNamespace(choose=lambda *_: "another", types=("bfloat16",))
        monkeypatch.setattr(verify, "function_of", lambda _: another)
    if other == "products":
        monkeypatch.setattr(verify, "_multiplication", lambda: "rounds to 16 bits between")
    graph = part(rounded if other == "program" else activated, 40 if other == "shape" else 24)
    count = 2 if other else 1
    assert known(graph) == known(graph) == f"off by {count}" and len(compared) == count


def test_a_folder_that_cannot_be_written_keeps_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.mkdir()
    cache.write_text("no folder")
    assert isinstance(regions.composed(part()), Composition)
    asked = forgotten(monkeypatch)
    assert isinstance(regions.composed(part()), Composition) and len(asked) == 1
