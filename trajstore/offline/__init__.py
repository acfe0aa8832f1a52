"""Owns offline RL data: stored trajectories → ILQL, PPO and preference sets; knows no trainer."""

from trajstore.offline.elements import (
    CausalILQLOutput,
    ILQLBatch,
    ILQLElement,
    ILQLSeq2SeqBatch,
    ILQLSeq2SeqElement,
    PPORLBatch,
    PPORLElement,
    Seq2SeqILQLOutput,
)
from trajstore.offline.ilql import ilql_dataset
from trajstore.offline.ilql_set import ILQLDataset, Report
from trajstore.offline.scaling import ReturnScale

__all__ = [
    "CausalILQLOutput",
    "ILQLBatch",
    "ILQLDataset",
    "ILQLElement",
    "ILQLSeq2SeqBatch",
    "ILQLSeq2SeqElement",
    "PPORLBatch",
    "PPORLElement",
    "Report",
    "ReturnScale",
    "Seq2SeqILQLOutput",
    "ilql_dataset",
]
