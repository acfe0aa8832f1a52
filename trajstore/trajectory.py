"""Owns the objects users hold: a trajectory, its policy versions and its status; knows no Arrow and no disk.

The first fields of each class are those of the public API it implements, in its order and with its
defaults; the ones that follow are optional. An axis letter T is the number of tokens of one trajectory.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import pairwise
from typing import Any, NoReturn, Self

from trajstore.errors import LengthMismatchError, ValidationError

Ints = Sequence[int] | Any
"""A list, numpy array or torch tensor of integers; decoded rows hold plain lists."""

Floats = Sequence[float] | Any
"""A list, numpy array or torch tensor of floats; decoded rows hold plain lists of float32 values."""


@dataclass
class PolicyVersion:
    """One publication of the policy's weights.

    Attributes:
        version_id: counter of weight publications.
        timestamp: seconds since the epoch.
        step: optimizer step at publication.
    """

    version_id: int = 0
    timestamp: float = 0.0
    step: int = 0


@dataclass
class VersionSegment:
    """Half-open span `[start, end)` of `tokens` that were sampled under one policy version."""

    start: int
    end: int
    version: PolicyVersion


class TrajectoryStatus(Enum):
    """Where a trajectory is in its life."""

    PENDING = "pending"
    GENERATING = "generating"
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Trajectory:
    """A single trajectory (prompt + response) with all metadata for training.

    Every per-token list is empty (not given), or T long, or as long as the response: then it is
    shifted to the response positions when the trajectory is stored. Index t belongs to token t.
    """

    # Identifiers
    id: str = ""
    group_id: str | None = None  # For multi-response sampling

    # Prompt
    prompt: str = ""
    prompt_tokens: Ints = field(default_factory=list)
    prompt_length: int = 0

    # Response
    response: str = ""
    response_tokens: Ints = field(default_factory=list)
    response_length: int = 0

    # Combined sequence
    tokens: Ints = field(default_factory=list)  # [T] int32
    attention_mask: Ints = field(default_factory=list)  # [T] int8, 0 or 1
    loss_mask: Ints = field(default_factory=list)  # [T] int8, 1 = train on this token

    # Log probabilities, nats
    log_probs: Floats = field(default_factory=list)  # [T] float32, recomputed by the trainer
    behavior_log_probs: Floats = field(default_factory=list)  # [T] float32, given by the engine

    # Rewards
    reward: float = 0.0
    token_rewards: Floats = field(default_factory=list)  # [T] float32, replaces `reward`

    # Training data
    values: Floats = field(default_factory=list)  # [T] float32, V of the state before token t
    advantages: Floats = field(default_factory=list)  # [T] float32
    returns: Floats = field(default_factory=list)  # [T] float32

    # Version tracking. None = not known; the page this class implements names no default.
    version: PolicyVersion | None = None
    version_segments: list[VersionSegment] = field(default_factory=list)

    # Status and metadata
    status: TrajectoryStatus = TrajectoryStatus.PENDING
    metadata: dict[str, Any] | None = field(default_factory=dict)
    generation_time_ms: float = 0.0

    # Beyond the page
    group_size: int | None = None  # how many the group was meant to have
    messages: list[Any] | None = None  # chat messages, verbatim
    action_mask: Ints = field(default_factory=list)  # [T] int8, 1 = sampled by the policy
    bootstrap_value: float | None = None  # V after the last token of a truncated episode
    log_probs_version: int | None = None  # policy version under which log_probs were recomputed
    version_span: tuple[int, int] | None = None  # (oldest, newest) when only these are known
    version_known: str | None = None  # exact, span, list or absent; None = derived from the above
    finish_reason: str | None = None
    terminated: bool | None = None  # False = cut off (bootstraps), None = not known
    parent_id: str | None = None
    tokens_retokenized: bool = False  # ids come from re-tokenising text
    source: str | None = None

    @property
    def total_length(self) -> int:
        """Number of tokens, prompt and response."""
        try:
            return len(self.tokens) or len(self.prompt_tokens) + len(self.response_tokens)
        except TypeError:  # one of them is no list: that is for the codec to name
            return 0

    @property
    def has_version_boundaries(self) -> bool:
        """Whether the trajectory spans more than one policy version."""
        return len({segment.version.version_id for segment in self.version_segments}) > 1

    @property
    def is_complete(self) -> bool:
        """Whether the status is COMPLETED."""
        return self.status is TrajectoryStatus.COMPLETED

    def get_version_gap(self, current_version: PolicyVersion | int) -> int:
        """Staleness: current version minus the trajectory's, in publications; negative when it is newer.

        Raises:
            ValidationError: the trajectory's version is not known.
        """
        if self.version is None:
            raise ValidationError(
                "the policy version is not known, so it has no version gap",
                id=self.id,
                column="version",
                hint="set Trajectory.version, or treat unknown versions as a stratum of their own",
            )
        return version_number(current_version) - self.version.version_id

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain JSON-able values; the inverse of `from_dict`."""
        return {f.name: _plain(f.name, getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Builds a trajectory from `to_dict`'s form; a field that is not there takes its default.

        A dict with fields of PartialTrajectory gives a PartialTrajectory, also when called on Trajectory.

        Raises:
            ValidationError: a key is not a field, or a version, segment or status has the wrong form.
        """
        target = cls
        if not issubclass(cls, PartialTrajectory) and not _PARTIAL_ONLY.isdisjoint(data):
            target = PartialTrajectory  # type: ignore[assignment]  # a subclass of every cls that gets here
        id = str(data.get("id") or "")
        known = _NAMES.get(target) or {f.name for f in fields(target)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValidationError(
                f"unknown field {unknown[0]!r}",
                id=id,
                hint="put extra values under 'metadata'; the fields are those of trajstore.Trajectory",
            )
        plain = dict(data)
        for name in _PARSED.intersection(plain):
            plain[name] = _parse(name, plain[name], id)
        return target(**plain)


@dataclass
class PartialTrajectory(Trajectory):
    """An aborted generation that can be continued (APRIL)."""

    continuation_prompt: str = ""
    start_rollout_id: str | None = None  # id of the first attempt
    continuation_count: int = 0
    kv_cache_ref: Any = None

    def can_continue(self, max_continuations: int = 3) -> bool:
        """Whether the generation was cut off and has continuations left."""
        return self.status in _UNFINISHED and self.continuation_count < max_continuations

    def prepare_continuation(self) -> str:
        """Sets and returns the text to generate from: the prompt and the response so far."""
        self.continuation_prompt = self.prompt + self.response
        return self.continuation_prompt

    def continue_with(
        self,
        tokens: Ints,
        log_probs: Floats | None,
        version: PolicyVersion | int | None,
        *,
        response: str = "",
        status: TrajectoryStatus = TrajectoryStatus.COMPLETED,
        finish_reason: str | None = None,
        max_response_length: int | None = None,
        kv_cache_ref: Any = None,
    ) -> PartialTrajectory:
        """The generation after the engine went on: a new row with a new id, which supersedes this one.

        Tokens, masks, `behavior_log_probs` and `version_segments` grow by the new tokens; each of the
        lists stays aligned as it was. Masks that were given take 1 for them, log-probs that one of the two
        parts does not have are NaN. What was computed from the shorter response is not carried over:
        reward, `log_probs`, `values`, `advantages`, `returns`, `token_rewards`, `bootstrap_value`.
        `version` stays the one the generation was started under. This object gets an id if it has none.

        Args:
            tokens: [n] the new tokens only; none when the request was aborted before it ran.
            log_probs: [n] under which the engine sampled them, None when it gave none.
            version: the policy version that sampled them; None = not known, then no segment of the
                new row is: it has no version.
            response: text of the new tokens.
            status: COMPLETED, or ABORTED when it was cut off again.
            finish_reason: as the engine said.
            max_response_length: budget of response tokens over all attempts.
            kv_cache_ref: the engine's reference for the next attempt.

        Raises:
            LengthMismatchError: log_probs are not as many as tokens; a list of this row fits neither its
                tokens nor its response.
            ValidationError: this row is not cut off; where its response begins is not known; the response
                would exceed the budget.
        """
        if self.status not in _UNFINISHED:
            self._refuse(f"its status is {self.status.value!r}, so there is nothing to continue", "status")
        new, given = _listed(tokens), None if log_probs is None else _listed(log_probs)
        if given is not None and len(given) != len(new):
            reason = f"has {len(given)} new values for {len(new)} new tokens"
            raise LengthMismatchError(reason, id=self.id, column="behavior_log_probs")
        old = _listed(self.tokens) or _listed(self.prompt_tokens) + _listed(self.response_tokens)
        prompt = self._prompt_size(len(old))
        total, sampled = len(old) + len(new), len(old) - prompt + len(new)
        if max_response_length is not None and sampled > max_response_length:
            self._refuse(
                f"{sampled} response tokens exceed max_response_length {max_response_length}",
                "response_length",
                f"generate at most {max_response_length - (sampled - len(new))} more tokens",
            )
        self.id = self.id or str(uuid.uuid4())
        lists: dict[str, Any] = {name: [] for name in _DERIVED}
        lists |= {name: self._grown(name, len(old), prompt, [1] * len(new)) for name in _MASKS}
        return replace(
            self,
            id=str(uuid.uuid4()),
            tokens=old + new,
            prompt_length=prompt,
            response_length=total - prompt,
            response=self.response + response,
            response_tokens=(_listed(self.response_tokens) or old[prompt:]) + new,
            behavior_log_probs=self._grown_log_probs(len(old), prompt, len(new), given),
            **lists,
            **self._grown_versions(len(old), prompt, len(new), version),
            reward=0.0,
            bootstrap_value=None,
            log_probs_version=None,
            terminated=None,
            metadata=None if self.metadata is None else dict(self.metadata),
            status=status,
            finish_reason=finish_reason,
            parent_id=self.id,
            start_rollout_id=self.start_rollout_id or self.id,
            continuation_count=self.continuation_count + 1,
            continuation_prompt="",
            kv_cache_ref=kv_cache_ref,
        )

    def _refuse(self, reason: str, column: str, hint: str | None = None) -> NoReturn:
        raise ValidationError(reason, id=self.id, column=column, hint=hint)

    def _prompt_size(self, total: int) -> int:
        prompt = self.prompt_length or len(self.prompt_tokens)
        response = self.response_length or len(self.response_tokens)
        if total and not prompt and not response:
            self._refuse(
                "where the response begins is not known", "prompt_length", "give the length of the prompt"
            )
        prompt = prompt or total - response
        if not 0 <= prompt <= total or (response and prompt + response != total):
            reason = f"prompt_length {prompt} + response_length {response} is not the {total} of tokens"
            raise LengthMismatchError(reason, id=self.id, column="tokens")
        return prompt

    def _grown(self, name: str, total: int, prompt: int, new: list[Any]) -> list[Any]:
        """A per-token list with new values behind it; one that was not given stays so."""
        values = _listed(getattr(self, name))
        if not values or len(values) == total or (len(values) == total - prompt and name != "attention_mask"):
            return values + new if values else []
        reason = f"has {len(values)} values, expected {total} (tokens) or {total - prompt} (response)"
        raise LengthMismatchError(reason, id=self.id, column=name)

    def _grown_log_probs(self, total: int, prompt: int, new: int, given: list[Any] | None) -> list[Any]:
        if len(self.behavior_log_probs):
            return self._grown("behavior_log_probs", total, prompt, given or [math.nan] * new)
        return [math.nan] * (total - prompt) + given if given else []

    def _grown_versions(
        self, total: int, prompt: int, new: int, version: PolicyVersion | int | None
    ) -> dict[str, Any]:
        """The version fields of the row that has `new` tokens more."""
        if version is not None and not isinstance(version, PolicyVersion):
            version = PolicyVersion(version_number(version))
        begun = version if total == prompt else self.version  # without a token it begins only now
        segments = list(self.version_segments)
        if not segments and begun is not None and self.version_span is None:
            segments = [VersionSegment(a, b, begun) for a, b in self._sampled_runs(total, prompt)]
        if not new:
            return {"version": begun or self.version, "version_segments": segments}
        if version is not None and self.version_span is not None:
            low, high = self.version_span
            span = (min(low, version.version_id), max(high, version.version_id))
            return {"version": begun, "version_span": span}
        if version is None or (total > prompt and not segments):
            return {"version": None, "version_segments": [], "version_span": None, "version_known": None}
        segments.append(VersionSegment(total, total + new, version))
        return {"version": begun or segments[0].version, "version_segments": segments, "version_known": None}

    def _sampled_runs(self, total: int, prompt: int) -> list[tuple[int, int]]:
        """Spans of the response that the policy sampled: all of it, unless action_mask says otherwise."""
        mask = _listed(self.action_mask) or [1] * (total - prompt)
        start = total - len(mask)
        edges = [start + i for i, (a, b) in enumerate(pairwise([0, *mask, 0])) if bool(a) != bool(b)]
        return list(zip(edges[::2], edges[1::2], strict=True))


_UNFINISHED = (TrajectoryStatus.ABORTED, TrajectoryStatus.GENERATING)
_MASKS = ("attention_mask", "loss_mask", "action_mask")
_DERIVED = ("log_probs", "token_rewards", "values", "advantages", "returns")


_NAMES = {kind: {f.name for f in fields(kind)} for kind in (Trajectory, PartialTrajectory)}
_PARTIAL_ONLY = _NAMES[PartialTrajectory] - _NAMES[Trajectory]


def version_number(version: PolicyVersion | int) -> int:
    """The counter of a policy version, given as a whole number of 64 bits or a PolicyVersion, or an error."""
    value: Any = version.version_id if isinstance(version, PolicyVersion) else version
    if hasattr(value, "__index__") and -(2**63) <= int(value) < 2**63:
        return int(value)
    raise ValidationError(f"policy version is {value!r}, expected a whole number of 64 bits")


def _listed(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values or ())


def _plain(name: str, value: Any) -> Any:
    match value:
        case _ if name == "kv_cache_ref":  # the engine's own object, whatever it is
            return value
        case PolicyVersion():
            return {"version_id": value.version_id, "timestamp": value.timestamp, "step": value.step}
        case TrajectoryStatus():
            return value.value
        case _ if name == "version_segments":
            return [
                {"start": s.start, "end": s.end, "version": _plain("version", s.version)} for s in value or ()
            ]
        case _ if name == "version_span" and value is not None:
            return list(value)
        case _ if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
            return value.tolist()
        case _:
            return value


_PARSED = frozenset({"version", "version_segments", "status", "version_span"})


def _parse(name: str, value: Any, id: str) -> Any:
    try:
        match name:
            case "version" if value is not None and not isinstance(value, PolicyVersion):
                return _parse_version(value)
            case "version_segments":
                return [s if isinstance(s, VersionSegment) else _parse_segment(s) for s in value or ()]
            case "status" if not isinstance(value, TrajectoryStatus):
                return TrajectoryStatus(value)
            case "version_span" if value is not None:
                oldest, newest = value
                return (oldest, newest)
            case _:
                return value
    except (TypeError, KeyError, ValueError) as error:
        raise ValidationError(
            f"cannot be read from {value!r} ({error})", id=id, column=name, hint=_FORMS.get(name)
        ) from error


def _parse_version(value: Any) -> PolicyVersion:
    return PolicyVersion(value) if isinstance(value, int) else PolicyVersion(**value)


def _parse_segment(value: Mapping[str, Any]) -> VersionSegment:
    return VersionSegment(value["start"], value["end"], _parse_version(value["version"]))


_FORMS = {
    "version": 'give {"version_id": 3, "timestamp": 0.0, "step": 0}, an integer, or null',
    "version_segments": 'give [{"start": 4, "end": 9, "version": {"version_id": 3}}]',
    "status": f"give one of {', '.join(s.value for s in TrajectoryStatus)}",
    "version_span": "give [oldest, newest]",
}
