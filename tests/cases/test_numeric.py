"""Theme: numbers that corrupt in silence (cases N*)."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from trajstore import Trajectory, TrajectoryBatch, TrajectoryStatus, TrajectoryStore, ValidationError
from trajstore.query import connect


def test_N01_none_in_log_probs_is_named_and_never_zero(case: Any, tmp_path: Path) -> None:
    row = Trajectory(id="r", response_tokens=case["response_ids"], behavior_log_probs=case["logprobs"])
    store = TrajectoryStore.create(tmp_path / "s")
    with pytest.raises(
        ValidationError, match=r"\(id 'r'\), column 'behavior_log_probs': found None at index 1"
    ):
        store.append([row])
    commit = store.append([row], nulls="nan")
    assert commit.not_finite == {"behavior_log_probs": 1}
    (tensor,) = store.scan().to_batch().to_tensors()["behavior_log_probs"]
    assert torch.isfinite(tensor).tolist() == [True, False, True]
    assert math.isnan(tensor[1])


def test_N02_nan_log_probs_are_reported_and_masked_reductions_stay_finite(case: Any, tmp_path: Path) -> None:
    log_probs = [float(x) for x in case["logprobs"]]
    store = TrajectoryStore.create(tmp_path / "s")
    commit = store.append(
        [
            Trajectory(
                id="collapsed",
                response_tokens=case["response_ids"],
                behavior_log_probs=log_probs,
                loss_mask=[1, 1, 1, 0, 0],
                reward=case["reward"],
                status=TrajectoryStatus.COMPLETED,
            ),
            Trajectory(id="sound", response_tokens=[1], behavior_log_probs=[-1.0]),
        ]
    )
    assert commit.not_finite == {"behavior_log_probs": 1}
    positions = connect(store).sql(
        "select sum((not isfinite(x))::int) n from (select unnest(behavior_log_probs) x from trajectories)"
    )
    assert positions.to_pylist() == [{"n": 2}]
    tensors = store.scan().to_batch().to_tensors()
    masked = torch.where(tensors["loss_mask"] > 0, tensors["behavior_log_probs"], 0).sum(1)
    assert torch.isfinite(masked).all()
    clean = connect(store).sql(
        "select id from trajectories where id not in (select id from "
        "(select id, unnest(behavior_log_probs) x from trajectories) where not isfinite(x))"
    )
    assert clean.to_pylist() == [{"id": "sound"}]


def test_N03_nan_rewards_are_found_on_every_path(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append([Trajectory(id=str(i), reward=r) for i, r in enumerate([1.0, 2.0, math.nan, 3.0])])
    frame = store.scan().to_polars()
    assert frame["reward"].is_nan().sum() == 1

    def sql(what: str) -> Any:
        return connect(store).sql(f"select {what} x from trajectories").to_pylist()[0]["x"]

    assert sql("count(*) filter (isnan(reward))") == 1
    assert connect(store).sql("select id from trajectories where isnan(reward)").num_rows == 1
    assert connect(store).sql("select id from trajectories where not isnan(reward)").num_rows == 3
    assert math.isnan(sql("max(reward)"))
    # One rule everywhere: NaN is above every number.
    over = connect(store).sql("select id from trajectories where reward > 5").num_rows
    assert (
        over == store.scan(where="reward > 5").count() == store.scan(where=pl.col("reward") > 5).count() == 1
    )
    raw = pl.scan_parquet(store.scan().data_files()).filter(pl.col("reward") > 5).collect()
    assert len(raw) == 1


def test_N06_bf16_is_exact_and_f16_extremes_are_counted(tmp_path: Path) -> None:
    bf16 = torch.tensor([-0.30103, -3.05e-05], dtype=torch.bfloat16)
    with np.errstate(over="ignore"):
        f16 = torch.tensor([0.1, 1e-9, -70000.0]).to(torch.float16)
    store = TrajectoryStore.create(tmp_path / "s")
    commit = store.append(
        [
            Trajectory(id="bf16", response_tokens=[1, 2], behavior_log_probs=bf16),
            Trajectory(id="f16", response_tokens=[1, 2, 3], behavior_log_probs=f16),
        ]
    )
    first, second = store.scan().to_trajectories()
    assert first.behavior_log_probs[0] == -0.30078125
    assert first.behavior_log_probs == bf16.to(torch.float32).tolist()
    assert second.behavior_log_probs == f16.to(torch.float32).tolist()
    assert math.isinf(second.behavior_log_probs[2])
    assert commit.not_finite == {"behavior_log_probs": 1}
    with pytest.raises(ValidationError, match=r"1e\+300 at index 0 is outside float32"):
        TrajectoryBatch([Trajectory(response_tokens=[1], behavior_log_probs=[1e300])])


@pytest.mark.parametrize(
    "make", [list, lambda x: np.array(x, np.int64), lambda x: np.array(x, np.uint32), torch.tensor]
)
def test_N07_integers_that_do_not_fit_raise_and_nothing_wraps(make: Any) -> None:
    with pytest.raises(ValidationError, match="'response_tokens': 2147483653 at index 1"):
        TrajectoryBatch([Trajectory(response_tokens=make([5, 2147483653]))])
    with pytest.raises(ValidationError, match="'loss_mask': 200 at index 1"):
        TrajectoryBatch([Trajectory(response_tokens=[5, 6], loss_mask=make([1, 200]))])
    with pytest.raises(ValidationError, match="'loss_mask': -100 at index 0"):
        TrajectoryBatch([Trajectory(response_tokens=[5, 6], loss_mask=[-100, 1])])
