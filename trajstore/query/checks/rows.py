"""Owns the checks of single rows: masks, alignment and numbers; reads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from trajstore.query.checks.finding import Check, Finding, found, where
from trajstore.query.survey import Survey

# Masks and alignment


def misaligned_mask(survey: Survey) -> Iterator[Finding]:
    """The loss mask is that of the response, one place early: the t → t+1 shift of raw logits."""
    yield from found(
        "error",
        "misaligned-mask",
        where(survey, pl.col("mask_shifted")),
        "{n}: loss_mask begins on the last prompt token and leaves out the last token of the response",
        "index t belongs to token t: shift the mask by one before it is stored",
    )


def misaligned_log_probs(survey: Survey) -> Iterator[Finding]:
    """The same of behavior log-probs."""
    yield from found(
        "error",
        "misaligned-log-probs",
        where(survey, pl.col("log_probs_shifted")),
        "{n}: behavior_log_probs begin on the last prompt token and are 0 on the last token of the response",
        "index t is the log-prob of token t, not of t+1: shift them by one before they are stored",
    )


def loss_on_prompt(survey: Survey) -> Iterator[Finding]:
    """Loss on tokens before the response."""
    rows = where(survey, (pl.col("loss_on_prompt") > 0) & ~pl.col("mask_shifted"))
    yield from found(
        "error",
        "loss-on-prompt",
        rows,
        f"{{n}}: loss_mask trains on {rows['loss_on_prompt'].sum():,} tokens of the prompt",
        "the policy did not sample them: set loss_mask to 0 before prompt_length, or leave it out",
    )


def loss_off_action(survey: Survey) -> Iterator[Finding]:
    """Loss on tokens that the environment wrote."""
    rows = where(survey, pl.col("loss_off_action") > pl.col("loss_on_prompt"))
    yield from found(
        "error",
        "loss-on-environment",
        rows,
        f"{{n}}: loss_mask trains on {rows['loss_off_action'].sum():,} tokens that action_mask excludes",
        "tool and user tokens are not the policy's: set loss_mask to 0 where action_mask is 0",
    )


def loss_off_attention(survey: Survey) -> Iterator[Finding]:
    """Loss on tokens that attention does not see."""
    yield from found(
        "error",
        "loss-on-hidden",
        where(survey, pl.col("loss_off_attention") > 0),
        "{n}: loss_mask trains on tokens whose attention_mask is 0",
        "these are padding, most likely: store rows unpadded",
    )


def no_loss_mask(survey: Survey) -> Iterator[Finding]:
    """Nothing says what to train on."""
    yield from found(
        "warning",
        "no-loss-mask",
        where(survey, ~pl.col("has_split") & (pl.col("length") > 0)),
        "{n}: neither loss_mask nor the split into prompt and response is known",
        "give one of the two; a loader refuses these rows",
    )


def no_tokens(survey: Survey) -> Iterator[Finding]:
    """Completed rows of text alone."""
    rows = survey.finished.filter(pl.col("length") == 0)
    yield from found(
        "note" if len(rows) == len(survey.finished) else "warning",
        "no-tokens",
        rows,
        "{n}: completed without a token",
        "good for SQL and text sets, nothing to train on: import with --tokenizer, or store the engine's ids",
    )


def nothing_to_learn(survey: Survey) -> Iterator[Finding]:
    """Completed rows with tokens, none of which is trained on."""
    idle = (pl.col("loss_tokens") == 0) & (pl.col("length") > 0) & pl.col("has_split")
    yield from found(
        "warning",
        "empty-loss",
        where(survey, idle & (pl.col("status") == "completed")),
        "{n}: completed, and no token is trained on",
        "leave them out: they take room in a batch; a group's mean still counts their reward",
    )


# Numbers


def nan_rewards(survey: Survey) -> Iterator[Finding]:
    """Rewards that are not numbers."""
    yield from found(
        "error",
        "nan-reward",
        where(survey, ~pl.col("reward").is_finite()),
        "{n}: reward is NaN or infinite",
        "look at the reward function; until then filter with where=pl.col('reward').is_finite()",
    )


def not_finite(survey: Survey) -> Iterator[Finding]:
    """Log-probs that are not numbers."""
    rows = where(survey, pl.col("not_finite") > 0)
    yield from found(
        "error",
        "nan-log-prob",
        rows,
        f"{{n}}: {rows['not_finite'].sum():,} sampled tokens have a log-prob that is NaN or infinite",
        "one of them makes the loss NaN: drop the rows, or mask the tokens out of loss_mask",
    )


def zero_behavior(survey: Survey) -> Iterator[Finding]:
    """Behavior log-probs that were never recorded: a probability of 1 for every token."""
    all_zero = (
        pl.col("has_behavior") & (pl.col("actions") > 1) & (pl.col("behavior_zero") == pl.col("actions"))
    )
    yield from found(
        "error",
        "zero-behavior-log-probs",
        where(survey, all_zero),
        "{n}: behavior_log_probs are 0 for every sampled token, a probability of 1",
        "ask the engine for log-probs (logprobs=0 or 1), and store null where there are none",
    )


def positive_behavior(survey: Survey) -> Iterator[Finding]:
    """Log-probs above 0."""
    yield from found(
        "error",
        "positive-log-prob",
        where(survey, pl.col("behavior_positive") > 0),
        "{n}: behavior_log_probs above 0, a probability above 1",
        "they may be probabilities, or negated: store natural logarithms",
    )


def no_behavior(survey: Survey) -> Iterator[Finding]:
    """Completed rows that no importance ratio can be made for."""
    lacking = ~pl.col("has_behavior") & (pl.col("actions") > 0) & ~pl.col("tokens_retokenized")
    rows = where(survey, lacking & (pl.col("status") == "completed"))
    yield from found(
        "note" if len(rows) == len(survey.finished) else "warning",
        "no-behavior-log-probs",
        rows,
        "{n}: completed without behavior_log_probs",
        "off-policy correction needs them: ask the engine for log-probs",
    )


def retokenized(survey: Survey) -> Iterator[Finding]:
    """Token ids that are not those the engine saw."""
    yield from found(
        "warning",
        "retokenized",
        where(survey, pl.col("tokens_retokenized")),
        "{n}: token ids come from re-tokenising text, so they may not be the ones that were sampled",
        "good for supervised training; for policy gradients store the engine's own ids",
    )


def copied_log_probs(survey: Survey) -> Iterator[Finding]:
    """log_probs of a later version that equal the behavior's bit for bit."""
    same = (pl.col("ratio_tokens") > 7) & (pl.col("log_ratio_max") == 0) & (pl.col("drift_gap") > 0)
    yield from found(
        "warning",
        "copied-log-probs",
        where(survey, same),
        "{n}: log_probs of a later version equal behavior_log_probs bit for bit",
        "one is a copy of the other, and every ratio is 1: recompute log_probs in the trainer",
    )


def unversioned_log_probs(survey: Survey) -> Iterator[Finding]:
    """log_probs that do not say of which version they are."""
    yield from found(
        "note",
        "log-probs-version",
        where(survey, pl.col("has_log_probs") & pl.col("log_probs_version").is_null()),
        f"{{n}}: log_probs do not say of which version they are; here they count as of version {survey.at}",
        "store log_probs_version with them",
    )


CHECKS: Sequence[Check] = (
    misaligned_mask,
    misaligned_log_probs,
    loss_on_prompt,
    loss_off_action,
    loss_off_attention,
    no_loss_mask,
    no_tokens,
    nothing_to_learn,
    nan_rewards,
    not_finite,
    zero_behavior,
    positive_behavior,
    no_behavior,
    retokenized,
    copied_log_probs,
    unversioned_log_probs,
)
