"""ILQL end to end on randomwalks: logged walks → store → scan → ILQL set → training → decoding.

    python tests/bench/randomwalks.py [SEEDS]

A graph of 21 nodes, of which the first is the goal; 1000 walks of a random walker were logged by trlX's
example (tests/golden/ilql). A walk scores 1 when it is a shortest one and 0 when it never arrives. Asked: the
logged walks score 0.3515 ± 0.0005; ILQL from them at least 0.93 with each of four seeds and 0.95 on average;
behaviour cloning (BC) from the same walks 0.2 to 0.45. Filtered BC, from the best fifth of the walks, comes
close to ILQL here (research/ilql.md §3.2), so nothing is asked of it. Exits 1 when a bound is missed.

A wrong index can still pass these bounds: the goldens are the real test of the data (tests/offline).
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from trajstore import Trajectory, TrajectoryStatus, TrajectoryStore
from trajstore.loader import TrajectoryLoader
from trajstore.offline import CausalILQLOutput, ILQLBatch, ILQLDataset, ilql_dataset
from trajstore.offline.decoding import Decoding, generate
from trajstore.offline.ilql_loss import ILQLConfig, ilql_loss
from trajstore.offline.ilql_model import CausalILQLModel

GOLDEN = Path(__file__).parents[1] / "golden" / "ilql" / "randomwalks_seed1000.json.gz"
GOAL, NODES, LONGEST = 0, 21, 10
EOS, PAD, VOCABULARY = 21, 22, 23
WIDTH, HEADS, LAYERS = 64, 4, 2
STEPS, BATCH = 300, 100
SAMPLES = 50
BEST_PART = 0.2
CONFIG = ILQLConfig(tau=0.8, gamma=0.99, cql_scale=0.1, awac_scale=1, beta=0, alpha=0.1)
GREEDY = Decoding(beta=100, temperature=1, top_k=10, max_new_tokens=LONGEST - 1)
PLAIN = Decoding(beta=0, temperature=1, top_k=10, max_new_tokens=LONGEST - 1)

Loss = Callable[[CausalILQLOutput, ILQLBatch], Tensor]


class Graph:
    """The graph, and how good a walk on it is."""

    def __init__(self, edges: Sequence[Sequence[int]], shortest: Sequence[int]) -> None:
        self.edges = edges
        self.shortest = shortest

    def optimality(self, walk: Sequence[int]) -> float:
        """1 for a shortest walk to the goal, 0 for one that takes a missing edge or never arrives."""
        if GOAL not in walk:
            return 0.0
        walk = walk[: walk.index(GOAL) + 1]
        if max(walk) >= NODES or not all(self.edges[a][b] for a, b in pairwise(walk)):
            return 0.0
        return (LONGEST - len(walk)) / (LONGEST - self.shortest[walk[0]])


def logged(graph: Graph, walks: Sequence[str]) -> list[Trajectory]:
    """The walks as rows: the start is the prompt, each move an action. One that arrives ends with EOS."""
    rows = []
    for i, text in enumerate(walks):
        walk = [ord(letter) - ord("a") for letter in text]
        arrived = walk[-1] == GOAL
        rows.append(
            Trajectory(
                id=f"walk-{i}",
                group_id=text[0],
                prompt=text[0],
                response=text[1:],
                prompt_tokens=walk[:1],
                response_tokens=[*walk[1:], EOS] if arrived else walk[1:],
                reward=graph.optimality(walk),
                status=TrajectoryStatus.COMPLETED,
                finish_reason="stop" if arrived else "length",
                terminated=True,  # ten nodes are the rule of the game: there is no value after them
            )
        )
    return rows


class Backbone(nn.Module):
    """A transformer small enough to train in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LONGEST + 1, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden states; rows are padded on the right, so none looks at padding."""
        width = input_ids.shape[1]
        x = self.token(input_ids) + self.place.weight[:width]
        hidden = self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(width), is_causal=True)
        return self.head(hidden), hidden


def ilql(outputs: CausalILQLOutput, batch: ILQLBatch) -> Tensor:
    return ilql_loss(outputs, batch, CONFIG)[0]


def cloning(outputs: CausalILQLOutput, batch: ILQLBatch) -> Tensor:
    """Cross-entropy of the actions and nothing else."""
    actions = batch.input_ids[:, 1:].gather(1, batch.actions_ixs)
    rows = torch.arange(len(actions))[:, None]
    losses = F.cross_entropy(
        outputs.logits[rows, batch.actions_ixs].flatten(0, 1), actions.flatten(), reduction="none"
    )
    return losses[batch.action_mask.flatten() > 0].mean()


def train(data: ILQLDataset, loss: Loss, seed: int, steps: int = STEPS) -> CausalILQLModel:
    """A model from scratch, `steps` batches of the set later."""
    torch.manual_seed(seed)
    model = CausalILQLModel(Backbone(), hidden_size=WIDTH, vocab_size=VOCABULARY, alpha=CONFIG.alpha)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    loader = TrajectoryLoader(data, batch_size=BATCH, shuffle=True, seed=seed)
    step = 0
    while step < steps:
        loader.set_epoch(step)  # another order each time
        for tensors in loader:
            batch = data.as_batch(tensors)
            outputs = model(batch.input_ids, batch.attention_mask, batch.states_ixs, batch.actions_ixs)
            optimizer.zero_grad()
            loss(outputs, batch).backward()
            optimizer.step()
            step += 1
            if step % CONFIG.steps_for_target_q_sync == 0:
                model.sync_target_q_heads()
            if step == steps:
                break
    return model


def evaluate(model: CausalILQLModel, graph: Graph, decoding: Decoding, seed: int) -> float:
    """Mean optimality of SAMPLES walks from each start."""
    starts = torch.arange(1, NODES).repeat(SAMPLES)[:, None]
    drawn = torch.Generator().manual_seed(seed)
    walks = generate(model, starts, eos_token_id=EOS, decoding=decoding, generator=drawn)
    return statistics.mean(graph.optimality(walk) for walk in walks.tolist())


def main(seeds: int) -> int:
    torch.set_num_threads(1)
    console = Console()
    golden = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    graph = Graph(golden["adjacency"], golden["shortest_nodes"])
    rows = logged(graph, golden["walks"])
    with tempfile.TemporaryDirectory() as folder:
        store = TrajectoryStore.create(Path(folder) / "walks")
        store.append(rows)
        walks = store.scan("status = 'completed'")
        rewards = sorted(walks.columns(["reward"]).to_arrow()["reward"].to_pylist())
        least = rewards[round((1 - BEST_PART) * len(rewards))]
        everything = ilql_dataset(walks, scale="global", pad_token_id=PAD)
        best = ilql_dataset(walks.filter(f"reward >= {least}"), pad_token_id=PAD)
    shown = [("logged data", [statistics.mean(rewards)], "0.351 to 0.352", 0.0)]
    plans: tuple[tuple[str, ILQLDataset, Loss, Decoding, str], ...] = (
        ("BC", everything, cloning, PLAIN, "each 0.2 to 0.45"),
        (f"filtered BC, reward >= {least:.3f}", best, cloning, PLAIN, ""),
        ("ILQL", everything, ilql, GREEDY, "each >= 0.93, mean >= 0.95"),
    )
    for name, data, loss, decoding, asked in plans:
        start = time.process_time()
        models = [train(data, loss, seed) for seed in range(seeds)]
        took = (time.process_time() - start) / seeds
        scores = [evaluate(model, graph, decoding, seed) for seed, model in enumerate(models)]
        console.log(name, *(f"{score:.3f}" for score in scores))
        shown.append((f"{name} ({len(data)} walks)", scores, asked, took))
    table = Table("", "mean", "each seed", "asked", "training, CPU s")
    for name, scores, asked, took in shown:
        each = " ".join(f"{score:.3f}" for score in scores) if len(scores) > 1 else ""
        table.add_row(name, f"{statistics.mean(scores):.4f}", each, asked, f"{took:.1f}" if took else "")
    console.print(f"randomwalks, optimality; {STEPS} steps, {NODES - 1} starts × {SAMPLES} samples")
    console.print(table)
    behaviour, cloned, _, learnt = (scores for _, scores, _, _ in shown)
    bounds = {
        "logged data": abs(behaviour[0] - 0.3515) <= 0.0005,
        "BC": all(0.2 <= score <= 0.45 for score in cloned),
        "ILQL, each seed": min(learnt) >= 0.93,
        "ILQL, mean": statistics.mean(learnt) >= 0.95,
    }
    missed = [name for name, held in bounds.items() if not held]
    console.print(f"missed: {', '.join(missed)}" if missed else "every bound holds")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
