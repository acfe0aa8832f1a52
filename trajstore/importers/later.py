"""Owns the formats that are recognised and not imported: each is named, so that a refusal says what it is."""

from __future__ import annotations

from trajstore.importers.head import Format, Head, told_by


def _is_roll(head: Head) -> str | None:
    if head.container == "pickle" and "roll.distributed.scheduler.protocol.DataProto" in head.names:
        return "is a pickle of ROLL's DataProto"
    if head.lists("global_step", "responses", "scores"):
        return "is a line of columns with 'global_step', 'responses' and 'scores'"
    return None


def _is_art(head: Head) -> str | None:
    if head.container == "parquet" and head.has("group_index", "reward", "messages", "logs"):
        return "has the columns 'group_index', 'messages' and 'logs'"
    return None


def _is_tinker(head: Head) -> str | None:
    if head.container == "json" and head.has("iteration", "group_idx", "traj_idx"):
        return "has 'iteration', 'group_idx' and 'traj_idx'"
    return None


def _is_gateway(head: Head) -> str | None:
    return "is an SQLite database, as rllm's gateway writes" if head.container == "sqlite" else None


def _is_prompts(head: Head) -> str | None:
    if head.container == "parquet" and head.has("data_source", "prompt", "reward_model"):
        return "has the columns 'data_source', 'prompt' and 'reward_model'"
    return None


def _is_groups(head: Head) -> str | None:
    if head.container == "torch" and head.has("partition_id", "groups", "saved_capacity"):
        return "is a torch archive with 'partition_id' and 'groups'"
    return None


FORMATS = (
    Format("roll", _is_roll, None),
    Format("art", _is_art, None),
    Format("tinker", _is_tinker, None),
    Format("rlinf", told_by("torch", "actions", "dones", "prev_logprobs"), None),
    Format("rllm-gateway", _is_gateway, None),
    Format("intellect-2", told_by("parquet", "input_tokens", "output_tokens", "proofs"), None),
    Format("nemo-rl-transfer-queue", _is_groups, None),
    Format("verl-prompts", _is_prompts, None),
)
WHY = {
    "tinker": "a summary of lengths and rewards holds no tokens and no text",
    "verl-prompts": "it holds prompts to train on, not what a policy answered",
    "rlinf": "its rows are tensors of actions and observations, not token sequences",
}
