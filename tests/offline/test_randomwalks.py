"""How good a walk is, as the end-to-end bench counts it, against what trlX's metric gave."""

import pytest

from tests.bench.randomwalks import EOS, LONGEST, PAD, Graph, logged
from tests.offline.goldens import golden

WALKS = golden("randomwalks_seed1000")
GRAPH = Graph(WALKS["adjacency"], WALKS["shortest_nodes"])


def nodes(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def test_optimality_is_trlx_s() -> None:
    found = [GRAPH.optimality(nodes(walk)) for walk in WALKS["walks"]]
    assert found == pytest.approx(WALKS["optimality"], abs=1e-6)
    assert sum(found) / len(found) == pytest.approx(0.3515, abs=0.0005)
    for text, said in WALKS["probes"]:
        if not text.startswith("a"):  # nobody starts at the goal, for which trlX gives 1.5
            assert GRAPH.optimality(nodes(text)) == pytest.approx(said["optimality"], abs=1e-6), text


@pytest.mark.parametrize("special", [EOS, PAD])
def test_tokens_that_are_no_nodes_are_no_moves(special: int) -> None:
    """A policy may draw them anywhere; they have no row in the graph."""
    s, d, goal = nodes("sda")
    assert GRAPH.optimality([s, d, goal, special, special]) == 1
    for walk in ([s, special, goal], [s, d, special, goal], [special, goal], [s, d, special], [s, special]):
        assert GRAPH.optimality(walk) == 0, walk


def test_a_row_ends_with_eos_when_it_arrives() -> None:
    arrived, late = logged(GRAPH, ["sda", "ebjnbdtkn"])
    assert (arrived.prompt_tokens, arrived.response_tokens) == ([18], [3, 0, EOS])
    assert (late.response_tokens[-1], len(late.response_tokens)) == (13, LONGEST - 2)
    assert (arrived.reward, late.reward) == (1, 0)
