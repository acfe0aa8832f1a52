"""The GRPO hook on a real TRL trainer: a tiny random model, on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore import InputError, TrajectoryStore
from trajstore.replay import replay

pytest.importorskip("trl", reason="the TRL hook needs trl, a dev extra")

pytestmark = [
    pytest.mark.slow,  # importing TRL alone takes ten seconds
    pytest.mark.filterwarnings("ignore"),  # TRL's and torch's own
]

WORDS = ["<pad>", "<eos>", "a", "b", "c", "d", "e", "f"]
STEPS, GENERATIONS, ROWS = 3, 2, 4


def a_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="f"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="f")


def a_trainer(path: Path, callback: Any) -> Any:
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip

    def likes_a(completions: list[str], **_: Any) -> list[float]:
        return [float(text.count("a")) for text in completions]

    def short(completions: list[str], **_: Any) -> list[float]:
        return [-float(len(text)) for text in completions]

    return GRPOTrainer(
        model=LlamaForCausalLM(config),
        reward_funcs=[likes_a, short],
        args=GRPOConfig(
            output_dir=str(path), max_steps=STEPS, per_device_train_batch_size=ROWS,
            num_generations=GENERATIONS, max_completion_length=6, num_iterations=2, report_to=[],
            use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, reward_weights=[1.0, 0.25],
            learning_rate=1e-2, logging_strategy="no", gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["b c", "d", "e b c d", "c c"] * 2}),
        processing_class=a_tokenizer(),
        callbacks=[callback],
    )  # fmt: skip


def test_a_grpo_run_lands_in_a_store_and_its_steps_come_again(tmp_path: Path) -> None:
    from trajstore.hooks.trl import GRPOLogger

    callback = GRPOLogger(tmp_path / "run")
    trainer = a_trainer(tmp_path / "out", callback)
    seen: list[dict[str, Any]] = []
    compute = trainer.compute_loss

    def computing(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append({k: v.clone() if hasattr(v, "clone") else v for k, v in inputs.items()})
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = computing
    with pytest.raises(InputError, match="has no _generate"):
        callback.watch(object())
    callback.watch(trainer)
    trainer.train()
    callback.close()

    store = TrajectoryStore.open(tmp_path / "run")
    rows = store.scan().to_trajectories()
    assert len(rows) == ROWS * 2, "generated before steps 0 and 2, each taken twice"
    assert [t.version.version_id for t in rows if t.version] == [0] * ROWS + [2] * ROWS
    for t in rows:
        assert t.metadata is not None
        given = t.metadata["rewards"]
        assert t.reward == pytest.approx(given["likes_a"] + 0.25 * given["short"])
        assert given["likes_a"] == t.response.count("a")
        assert t.terminated == (t.tokens[-1] == 1)
        assert t.terminated or t.response_length == 6
        assert [WORDS.index(word) for word in t.prompt.split()] == t.tokens[: t.prompt_length]
        assert t.log_probs_version == t.version.version_id  # type: ignore[union-attr]
        assert all(p < 0 for p in t.log_probs[t.prompt_length :])
        assert len(t.behavior_log_probs) == 0, "transformers' generate gives none, and none is made up"
        assert t.group_size == GENERATIONS
    groups = {t.group_id for t in rows}
    assert len(groups) == len(rows) // GENERATIONS
    for group in groups:
        assert len({t.prompt for t in rows if t.group_id == group}) == 1

    ledger = store.ledger()
    assert ledger["step"].to_pylist() == [step for step in (1, 2, 3) for _ in range(ROWS)]
    assert len(seen) == STEPS
    for step, inputs in enumerate(seen, start=1):
        trained = replay(store, step=step)
        for i, t in enumerate(trained):
            prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
            answer = inputs["completion_ids"][i][inputs["completion_mask"][i].bool()].tolist()
            assert t.tokens == prompt + answer
            np.testing.assert_array_equal(
                np.float32(t.advantages[t.prompt_length :]), inputs["advantages"][i].float().numpy()
            )
            kept = inputs["completion_mask"][i].bool()
            np.testing.assert_array_equal(
                np.float32(t.log_probs[t.prompt_length :]), inputs["old_per_token_logps"][i][kept].numpy()
            )
