"""Owns the test that every framework's dump of the four toy trajectories becomes the rows it must be."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore import Trajectory, TrajectoryBatch, TrajectoryStatus
from trajstore.errors import ImportFormatError
from trajstore.importers import FORMATS, ImportOptions, detect, later, open_importer

FORMATS_DIR = Path(__file__).parents[1] / "formats"
CANON = [json.loads(line) for line in (FORMATS_DIR / "canonical.jsonl").read_text().splitlines()]

EPISODES = "rllm/logs/proj/exp/episodes/train_step_8_epoch_0"
# What a dump holds: t(okens), m(ask), b(ehaviour log-probs), l(og-probs), r(eward), a(dvantages), g(roups),
# v(ersion of each row) or s(pan), x = text, c = status cut off.
CASES: list[tuple[str, str, str, Sequence[int]]] = [
    ("verl/rollout_data_dir/8.jsonl", "verl-jsonl", "x r g", range(4)),
    ("verl/rollout_data_dir_v1/8.jsonl", "verl-jsonl", "x r g", range(4)),
    ("verl/skip/exp_proj/GBS2_N2_in6_out11/8/gen_batch.dp", "verl-dataproto", "t m b r g v", range(4)),
    ("verl/skip/exp_proj/GBS2_N2_in6_out11/9/gen_batch.dp", "verl-dataproto", "t m b r g v", range(4)),
    ("verl/skip_tq/exp_proj/GBS2_N2_in6_out11/8/0/tq_batch.pt", "verl-tq", "t m b r g v", range(4)),
    ("slime/rollout_data/8.pt", "slime", "t m b l a r g v x c", range(4)),
    ("slime/rollout_data/eval_8.pt", "slime", "t m b r v x", [0]),
    ("slime/train_data/8.pt", "slime-train", "t m b l a", [0, 1, 2]),
    ("miles/rollout_data/8.pt", "slime", "t m b l a r g v x c", range(4)),
    ("miles/train_data/8_0.pt", "slime-train", "t m b l a", [0, 1, 2]),
    ("miles/dashboard_columns/rollout_8.parquet", "miles-columns", "t m b", range(4)),
    ("miles/trajectory/8.jsonl", "miles-trajectory", "x r g c", range(4)),
    ("areal/logs/me/exp/trial/rollout/7/0.jsonl", "areal", "r", [0]),
    ("areal/logs/me/exp/trial/rollout/5/3.jsonl", "areal", "r", [3]),
    ("prime_rl/rollouts/step_8/train/all/traces.jsonl", "prime-rl", "t m b a r g v c", range(4)),
    ("prime_rl/rollouts/step_8/train/effective/traces.jsonl", "prime-rl", "t m b a r g v", [0, 1, 2]),
    ("prime_rl/rollouts/step_8/rank_0.bin", "prime-rl-packed", "t m b a", [0, 1, 2]),
    ("prime_rl/token_exports/step_8/rank_0.jsonl", "prime-rl-tokens", "t m b l a", [0, 1, 2]),
    ("verifiers_legacy/results.jsonl", "verifiers", "t m b r g x", range(4)),
    ("trl/completions/completions_00008.parquet", "trl", "g x", range(4)),
    ("trlx/run-00000000-0000-0000-0000-000000000007/epoch-1700000000.0.json", "trlx", "t g", range(4)),
    ("trlx/run-00000000-0000-0000-0000-000000000007/epoch-1700000001.0.json", "trlx", "t b r g", range(4)),
    ("openrlhf/generate.jsonl", "openrlhf", "g x", range(4)),
    ("openrlhf/rm.jsonl", "openrlhf", "r g x", range(4)),
    ("nemo_rl/exp_001/train_data_step8.jsonl", "nemo-rl", "t m b l a r g", range(4)),
    ("nemo_rl/exp_001/val_data_step8.jsonl", "nemo-rl-val", "r g x", range(4)),
    ("nemo_rl/exp_001/replay_buffer.pt", "nemo-rl-buffer", "t b r g", range(4)),
    ("skyrl/dumped_data/global_step_8_training_input.pkl", "skyrl", "t m b l r g", range(4)),
    ("skyrl/dumped_evals/global_step_8_evals/toy.jsonl", "skyrl-evals", "r g x", range(4)),
    ("open_instruct/run_rollouts_000000.jsonl", "open-instruct", "t b a r g", range(4)),
    *(
        (f"{EPISODES}/episode_hash0000000{i // 2}_idtask{i // 2}_{i}.json",
         "rllm", "r x", [i])
        for i in range(4)
    ),
    *((f"atif/trial_{i}/agent/trajectory.json", "atif", "t m b r", [i]) for i in range(4)),
]  # fmt: skip
LATER = {
    "art/trajectories/train/0008.parquet": "art",
    "rlinf/trajectory_0_w7.pt": "rlinf",
    "rllm/gateway_traces.db": "rllm-gateway",
    "roll/mock/train/step_000008.pkl": "roll",
    "roll/rollout_dump_data.step_8.jsonl": "roll",
    "tinker/iteration_000008/train_rollout_summaries.jsonl": "tinker",
    "prime_rl/intellect2.parquet": "intellect-2",
    "hf/verl_rl_input.parquet": "verl-prompts",
}


def imported(name: str) -> list[Trajectory]:
    """Rows as they come out of Arrow again, so that alignment and the contract are checked too."""
    items = open_importer("auto")(FORMATS_DIR / name, ImportOptions())
    return list(TrajectoryBatch([item.trajectory for item in items]))


def response(row: Trajectory, column: str) -> list[float]:
    values = list(getattr(row, column))
    assert len(values) == len(row.tokens)
    return values[row.prompt_length :]


@pytest.mark.parametrize(("name", "format", "held", "which"), CASES, ids=[case[0] for case in CASES])
def test_a_dump_becomes_its_canonical_rows(name: str, format: str, held: str, which: Sequence[int]) -> None:
    assert detect(FORMATS_DIR / name).format == format
    rows, holds = imported(name), set(held.split())
    assert len(rows) == len(which)
    assert len({row.id for row in rows}) == len(rows)
    for row, index in zip(rows, which, strict=True):
        canon = CANON[index]
        assert row.source == f"{format}:{Path(name).name}"
        _tokens(row, canon, holds)
        _floats(row, canon, holds)
        _version(row, canon, holds)
        if "r" in holds and not (format == "slime" and index == 3):  # an aborted sample has no reward yet
            assert row.reward == canon["reward"]
        elif format != "trl":
            assert math.isnan(row.reward)
        if "x" in holds:
            assert canon["prompt"] == list(row.prompt.encode())
            assert row.response.encode() == bytes(canon["resp"]).removesuffix(b"\3")
        cut = "c" in holds and canon["status"] == "aborted"
        assert row.status is (TrajectoryStatus.ABORTED if cut else TrajectoryStatus.COMPLETED)
    groups = [row.group_id for row in rows]
    if "g" in holds and len(rows) == 4:
        assert groups[0] == groups[1] != groups[2] == groups[3]
        assert None not in groups


def _tokens(row: Trajectory, canon: dict[str, Any], holds: set[str]) -> None:
    if "t" not in holds:
        assert not len(row.tokens)
        assert not len(row.loss_mask)
        return
    assert list(row.tokens) == canon["prompt"] + canon["resp"]
    assert row.prompt_length == len(canon["prompt"])
    assert row.response_length == len(canon["resp"])
    assert not row.tokens_retokenized
    if "m" in holds:
        if len(row.loss_mask):
            assert response(row, "loss_mask") == canon["mask"]
            assert not any(row.loss_mask[: row.prompt_length])
        else:  # not given: ones on the response
            assert all(canon["mask"])


def _floats(row: Trajectory, canon: dict[str, Any], holds: set[str]) -> None:
    for letter, column, key in (
        ("b", "behavior_log_probs", "logprobs"),
        ("l", "log_probs", "train_logprobs"),
        ("a", "advantages", "adv"),
    ):
        joined_later = row.source is not None and row.source.startswith("slime:") and canon["idx"] == 3
        if letter not in holds or (letter in "la" and joined_later):
            assert not len(getattr(row, column)), f"{column} is invented"
            continue
        found = np.asarray(response(row, column))
        expected = np.asarray(canon[key], np.float32)
        if letter == "a":
            sampled = np.asarray(canon["mask"], bool)
            found, expected = found[sampled], np.full(sampled.sum(), canon[key])
        np.testing.assert_allclose(found, expected, atol=1e-7)


def _version(row: Trajectory, canon: dict[str, Any], holds: set[str]) -> None:
    assert not row.version_segments
    if "v" not in holds:
        if row.source == "nemo-rl-buffer:replay_buffer.pt":
            assert row.version is not None
            assert row.version.version_id == (6 if canon["idx"] < 2 else 5)
        else:
            assert row.version_known == "absent"
            assert row.version is None
        return
    ends = (min(canon["ver"]), max(canon["ver"]))
    if ends[0] == ends[1]:
        assert row.version_known == "exact"
        assert row.version is not None
        assert row.version.version_id == ends[0]
    else:
        assert row.version_known in ("span", "list")
        assert row.version is None
        assert row.version_span == ends


@pytest.mark.parametrize(("name", "format"), LATER.items())
def test_what_comes_later_is_named(name: str, format: str) -> None:
    with pytest.raises(Exception, match=f"that is {format}, which is not imported: ") as caught:
        detect(FORMATS_DIR / name)
    assert isinstance(caught.value, ImportFormatError)
    with pytest.raises(Exception, match="is not imported"):
        open_importer(format)


def test_every_format_has_a_fixture_here() -> None:
    elsewhere = {"areal-batch", "agent-steps", "preference", "sharegpt", "completion", "messages"}
    seen = {case[1] for case in CASES} | elsewhere | {"trajstore-jsonl", "trajstore-parquet"}
    assert seen == set(FORMATS)
    assert {f.name for f in later.FORMATS} - {"nemo-rl-transfer-queue"} == set(LATER.values())


@pytest.mark.parametrize(
    ("name", "format", "texts"),
    [
        ("hh_rlhf.jsonl", "preference", [("\n\nHuman: 2+2=\n\nAssistant:", "4"), ("", "five")]),
        ("preference_explicit.jsonl", "preference", [("2+2=", "4"), ("2+2=", "five")]),
        ("preference_implicit.jsonl", "preference", [("2+2=", "4"), ("2+2=", "five")]),
        ("sharegpt.jsonl", "sharegpt", [("2+2=", "4")]),
        ("stepwise.jsonl", "completion", [("2+2=", "2+2\n=4")]),
        ("unpaired.jsonl", "completion", [("2+2=", "4")]),
        ("messages.jsonl", "messages", [("2+2=", "4")]),
    ],
)
def test_dataset_shapes(name: str, format: str, texts: list[tuple[str, str]]) -> None:
    assert detect(FORMATS_DIR / "hf" / name).format == format
    rows = imported(f"hf/{name}")
    assert [row.response for row in rows] == [answer for _, answer in texts]
    assert rows[0].prompt == texts[0][0]
    assert all(math.isnan(row.reward) for row in rows)
    if format == "preference":
        assert [row.metadata["preference"] for row in rows] == ["chosen", "rejected"]  # type: ignore[index]
        assert rows[0].group_id == rows[1].group_id is not None


def test_a_pair_with_rewards_keeps_them() -> None:
    assert [row.reward for row in imported("openrlhf/iter_dpo.jsonl")] == [1.0, 0.0]


def test_unknown_keys_are_kept() -> None:
    verl = imported("verl/rollout_data_dir/8.jsonl")[0].metadata
    assert verl == {"gts": "4", "step": 8, "acc": True, "request_id": "req-0", "group_by": "equal prompt"}
    batch = imported("verl/skip/exp_proj/GBS2_N2_in6_out11/8/gen_batch.dp")[2].metadata
    assert batch is not None
    assert batch["reward_model"] == {"style": "rule", "ground_truth": "9"}
    assert batch["__num_turns__"] == 4
    slime = imported("slime/rollout_data/8.pt")[3].metadata
    assert slime is not None
    assert slime["metadata"] == {"start_rollout_id": 5}
    assert slime["prefix_cache_info"]["total_prompt_tokens"] == 5
    assert imported("areal/logs/me/exp/trial/rollout/7/0.jsonl")[0].metadata["tail_version"] == 7  # type: ignore[index]
    assert imported("prime_rl/token_exports/step_8/rank_0.jsonl")[0].metadata["entropy"][-1] == 0.3  # type: ignore[index]


def test_trl_sums_named_rewards_and_says_so() -> None:
    row = imported("trl/completions/completions_00008.parquet")[0]
    assert row.reward == 1.5
    assert row.metadata is not None
    assert row.metadata["rewards"] == {"accuracy_reward": 1.0, "format_reward": 0.5}
    assert row.metadata["reward_is"] == "the sum of them, each with weight 1"


def test_trlx_keeps_the_sum_of_what_is_behind_the_response() -> None:
    name = "trlx/run-00000000-0000-0000-0000-000000000007/epoch-1700000001.0.json"
    row = imported(name)[0]
    assert row.reward == 1.0
    assert list(row.token_rewards)[-2:] == [0.0, 1.0]
    assert row.metadata == {"pad_id": 0, "group_by": "equal prompt", "reward_is": "score less KL penalty"}


def test_slime_rows_are_joined_with_the_train_dump() -> None:
    row = imported("slime/rollout_data/8.pt")[1]
    np.testing.assert_allclose(response(row, "log_probs"), CANON[1]["train_logprobs"], rtol=1e-6)
    assert row.metadata is not None
    assert row.metadata["trained"]["rewards"] == -1.0


def test_groups_are_derived_only_when_wanted() -> None:
    path = FORMATS_DIR / "openrlhf/rm.jsonl"
    rows = open_importer("auto")(path, ImportOptions(derive_groups=False))
    assert {item.trajectory.group_id for item in rows} == {None}
