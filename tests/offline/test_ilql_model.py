"""Heads, target sync and decoding against trlX's recorded ones, and models over real backbones."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.offline.goldens import golden
from trajstore import InputError, Trajectory, TrajectoryBatch
from trajstore.offline import elements, ilql_dataset
from trajstore.offline.decoding import Decoding, generate, generate_seq2seq, topk_mask
from trajstore.offline.ilql_loss import ILQLConfig, ilql_loss
from trajstore.offline.ilql_model import CausalILQLModel, ILQLHeads, Seq2SeqILQLModel

OPS = golden("ilql_model_ops")["ops"]


def close(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_outputs_have_trlx_s_fields() -> None:
    for name, expected in OPS["output_class_fields"].items():
        assert [f.name for f in fields(getattr(elements, name))] == expected


def test_heads_give_what_trlx_s_give() -> None:
    case = OPS["ilql_heads_forward"]
    state = {name: torch.tensor(value) for name, value in case["state_dict"].items()}
    heads = ILQLHeads(4, 6)
    heads.load_state_dict(state)
    hidden = torch.tensor(case["hs"])
    qs, targets, vs = heads(hidden, torch.tensor(case["states_ixs"]), torch.tensor(case["actions_ixs"]))
    for found, expected in zip((*qs, *targets), (*case["qs"], *case["target_qs"]), strict=True):
        close(found, expected)
    close(vs, case["vs"])
    qs, _, vs = heads(hidden)
    close(vs, case["full_vs"])
    close(qs[0], case["full_q0"])


@pytest.mark.parametrize("case", OPS["polyak"], ids=lambda case: str(case["alpha"]))
def test_target_heads_follow_by_polyak_or_by_a_hard_copy(case: dict[str, Any]) -> None:
    heads = ILQLHeads(2, 3, alpha=case["alpha"])
    heads.load_state_dict({name: torch.tensor(value) for name, value in case["before"].items()})
    heads.sync_target_q_heads()
    for name, tensor in heads.state_dict().items():
        close(tensor, case["after"].get(name, case["before"][name]))


def test_target_heads_start_as_copies_that_nothing_trains() -> None:
    heads = ILQLHeads(4, 6)
    for target, source in zip(heads.target_q_heads.parameters(), heads.q_heads.parameters(), strict=True):
        assert torch.equal(target, source)
        assert target.data_ptr() != source.data_ptr()
        assert not target.requires_grad


@pytest.mark.parametrize("case", OPS["topk_mask"], ids=lambda case: f"k={case['k']}")
def test_topk_mask(case: dict[str, Any]) -> None:
    xs = torch.tensor(case["xs"])
    if "error" in case:
        with pytest.raises(InputError, match="top_k is 0"):
            topk_mask(xs, case["k"])
    else:
        assert topk_mask(xs, case["k"]).tolist() == case["out"]


class Tables(nn.Module):
    """Backbone and heads that look the last token up; it notes how it is called."""

    def __init__(self, tables: dict[str, Any], cached: bool) -> None:
        super().__init__()
        self.logits = torch.tensor(tables["logits"])
        self.cached = cached
        self.calls: list[dict[str, Any]] = []

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: Any = None
    ) -> Any:
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        self.calls.append({name: tensor.tolist() for name, tensor in given.items()})
        hidden = nn.functional.one_hot(input_ids, 10).float()
        return (self.logits[input_ids], hidden, "cache") if self.cached else (self.logits[input_ids], hidden)


class TableHeads(nn.Module):
    def __init__(self, tables: dict[str, Any], two_qs: bool) -> None:
        super().__init__()
        names = ("q0", "q1") if two_qs else ("q0",)
        self.q, self.v = [torch.tensor(tables[name]) for name in names], torch.tensor(tables["v"])

    def forward(self, hidden: Tensor, states: Any, actions: Any) -> Any:
        qs = tuple(hidden @ q for q in self.q)
        return qs, qs, hidden @ self.v


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("cached", [True, False])
def test_greedy_decoding_is_trlx_s(number: int, cached: bool) -> None:
    case = OPS["generate_greedy"]
    run = case["runs"][number]
    args = dict(run["args"])
    model = CausalILQLModel(Tables(case["tables"], cached), hidden_size=10, vocab_size=10)
    model.ilql_heads = TableHeads(case["tables"], args.pop("two_qs"))  # type: ignore[assignment]  # looks up, learns nothing
    if "logit_mask" in args:
        args["logit_mask"] = torch.tensor(args["logit_mask"])
    found = generate(
        model,
        torch.tensor(case["prompt"]),
        torch.tensor(case["attention_mask"]),
        eos_token_id=case["eos"],
        decoding=Decoding(temperature=0, max_new_tokens=case["max_new_tokens"], **args),
    )
    assert found.tolist() == run["samples"]
    if run["calls"] and cached:
        assert model.backbone.calls == run["calls"]


def test_drawing_follows_the_scores_and_a_seed() -> None:
    case = OPS["generate_greedy"]
    model = CausalILQLModel(Tables(case["tables"], True), hidden_size=10, vocab_size=10)
    model.ilql_heads = TableHeads(case["tables"], True)  # type: ignore[assignment]  # looks up, learns nothing
    prompts = torch.full((4000, 1), 3)

    def draw(seed: int, **options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        decoding = Decoding(max_new_tokens=1, **options)
        return generate(model, prompts, eos_token_id=9, decoding=decoding, generator=generator)[:, 1]

    tables = {name: torch.tensor(value) for name, value in case["tables"].items()}
    advantage = torch.minimum(tables["q0"][3], tables["q1"][3]) - tables["v"][3]
    chances = ((tables["logits"][3].log_softmax(-1) + 2 * advantage) / 1.5).softmax(-1)
    found = torch.bincount(draw(0, beta=2.0, temperature=1.5), minlength=10) / 4000
    assert (found - chances).abs().max() < 0.03
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert len(draw(0, top_k=2).unique()) == 2


@pytest.mark.parametrize("wrong", [{"top_k": 0}, {"temperature": -1.0}, {"max_new_tokens": -1}])
def test_decoding_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected"):
        Decoding(**wrong)


def test_sizes_must_be_known() -> None:
    with pytest.raises(InputError, match="pass hidden_size"):
        CausalILQLModel(nn.Linear(2, 2))


def batch_of(**options: Any) -> Any:
    rows = [
        Trajectory(prompt_tokens=[1, 2], response_tokens=[3, 4, 5], reward=1.0, terminated=True),
        Trajectory(prompt_tokens=[1], response_tokens=[6, 5], reward=0.0, terminated=False),
    ]
    return ilql_dataset(TrajectoryBatch(rows), **options).batch()


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_positions=32, n_embd=16, n_layer=2, n_head=2,
                                     bos_token_id=1, eos_token_id=5)  # fmt: skip
    return CausalILQLModel(transformers.GPT2LMHeadModel(config).eval())


def t5() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=11, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                                   decoder_start_token_id=0, pad_token_id=0, eos_token_id=5)  # fmt: skip
    return Seq2SeqILQLModel(transformers.T5ForConditionalGeneration(config).eval())


def test_a_transformers_model_learns_and_decodes() -> None:
    model, batch = gpt2(), batch_of()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(25):
        out = model(batch.input_ids, batch.attention_mask, batch.states_ixs, batch.actions_ixs)
        assert out.value.shape == (2, 4, 1)
        assert [q.shape for q in out.qs] == [(2, 3, 11)] * 2
        loss, stats = ilql_loss(out, batch, ILQLConfig())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.sync_target_q_heads()
        losses.append(stats["losses/loss"])
    assert losses[-1] < losses[0] / 2
    prompts = torch.tensor([[0, 1], [1, 2]])
    mask = torch.tensor([[0, 1], [1, 1]])
    greedy = Decoding(temperature=0, max_new_tokens=6, beta=0)
    found = generate(model, prompts, mask, eos_token_id=5, decoding=greedy)
    assert found[1].tolist()[:5] == [1, 2, 3, 4, 5]
    # Left padding changes nothing, nor does the cache.
    (alone,) = generate(model, torch.tensor([[1]]), eos_token_id=5, decoding=greedy).tolist()
    assert found[0].tolist()[1 : 1 + len(alone)] == alone


def test_an_encoder_decoder_of_transformers_learns_and_decodes() -> None:
    model = t5()
    batch = batch_of(architecture="seq2seq", decoder_start_token_id=0)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(30):
        out = model(
            batch.input_ids,
            batch.attention_mask,
            batch.decoder_input_ids,
            batch.states_ixs,
            batch.actions_ixs,
        )
        assert out.encoder_outputs[0].shape == (2, 2, 16)
        loss, stats = ilql_loss(out, batch, ILQLConfig())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(stats["losses/loss"])
    assert losses[-1] < losses[0] / 2
    found = generate_seq2seq(
        model,
        batch.input_ids,
        batch.attention_mask,
        decoder_start_token_id=0,
        eos_token_id=5,
        decoding=Decoding(temperature=0, beta=0, max_new_tokens=5),
    )
    assert found[0, :4].tolist() == [0, 3, 4, 5]


class Pair(nn.Module):
    """A plain encoder-decoder that keeps no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Any:
        told = (self.embed(input_ids) * attention_mask[..., None]).mean(1, keepdim=True)
        hidden = self.embed(decoder_input_ids) + told
        return self.out(hidden), hidden


def test_any_backbone_that_gives_hidden_states_will_do() -> None:
    model = Seq2SeqILQLModel(Pair(), hidden_size=6, vocab_size=11, two_qs=False)
    batch = batch_of(architecture="seq2seq")
    out = model(
        batch.input_ids, batch.attention_mask, batch.decoder_input_ids, batch.states_ixs, batch.actions_ixs
    )
    loss, _ = ilql_loss(out, batch, ILQLConfig(two_qs=False))
    loss.backward()
    assert model.backbone.embed.weight.grad.abs().sum() > 0
    found = generate_seq2seq(
        model, batch.input_ids, batch.attention_mask, decoder_start_token_id=0, eos_token_id=5,
        decoding=Decoding(max_new_tokens=3),
    )  # fmt: skip
    assert found.shape[0] == 2
    assert found[:, 0].tolist() == [0, 0]


def test_a_row_that_ended_attends_to_nothing_more() -> None:
    case = OPS["generate_greedy"]
    model = CausalILQLModel(Tables(case["tables"], True), hidden_size=10, vocab_size=10)
    model.ilql_heads = TableHeads(case["tables"], True)  # type: ignore[assignment]  # looks up, learns nothing
    decoding = Decoding(temperature=0, beta=100, max_new_tokens=3)
    prompts, mask = torch.tensor(case["prompt"]), torch.tensor(case["attention_mask"])
    found = generate(model, prompts, mask, eos_token_id=9, decoding=decoding)
    assert found[2].tolist() == [6, 7, 8, 9, 9, 9]
    masks = [call["attention_mask"] for call in model.backbone.calls]
    assert [m[2] for m in masks] == [[1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert masks[2][0] == [0, 0, 1, 1, 1]
