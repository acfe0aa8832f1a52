"""The report as a browser sees it, and its facts against the store's own rows."""

import math
import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from trajstore import PolicyVersion, Trajectory, TrajectoryStatus, TrajectoryStore
from trajstore.report import Facts, bundle, gather, page
from trajstore.report.facts import OTHER_TASKS, SHOWN_TASKS, reward_histogram

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_NETWORK = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--virtual-time-budget=60000", "--enable-logging=stderr", "--window-size=1280,2000", "--dump-dom"),
)
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def rows(count: int = 160) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        n = int(rng.integers(1, 30))
        log_probs = -rng.exponential(1, n)
        version = PolicyVersion(i // 20)
        made.append(
            Trajectory(
                id=f"r{i}",
                group_id=f"g{i // 4}",
                prompt_tokens=[1, 2],
                response_tokens=rng.integers(0, 99, n),
                behavior_log_probs=log_probs,
                log_probs=log_probs + rng.normal(0, 0.05 * (9 - version.version_id), n),
                log_probs_version=9,
                reward=math.nan if i == 7 else float(rng.random()),
                version=version,
                status=TrajectoryStatus.ABORTED if i % 20 == 19 else TrajectoryStatus.COMPLETED,
                finish_reason="length" if i % 9 == 0 else "stop",
                metadata={"task": HOSTILE if i % 3 == 0 else f"task {i % 2}"},
                source="run",
            )
        )
    return made


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    store = TrajectoryStore.create(tmp_path_factory.mktemp("report") / "a <b> store")
    store.append(rows())
    return gather(store, at=9, by="metadata.task")


@pytest.fixture(scope="module")
def text(facts: Facts) -> str:
    return page(facts)


@dataclass
class Seen:
    """The page after a browser has drawn it: its elements, and what it said in the console."""

    dom: str
    console: list[str]


def look(text: str, folder: Path) -> Seen:
    assert CHROMIUM is not None
    path = folder / "report.html"
    path.write_text(text)
    command = [CHROMIUM, *NO_NETWORK, f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return Seen(done.stdout, re.findall(r"CONSOLE\S* (.*)", done.stderr))


class Links(HTMLParser):
    """Whatever an element would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset")]
        self.found += [tag] if tag in ("link", "iframe", "object", "embed", "base", "img") else []


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def seen(text: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return look(text, tmp_path_factory.mktemp("browser"))


@needs_chromium
@pytest.mark.slow
def test_a_browser_draws_every_plot_and_says_nothing_in_the_console(seen: Seen, text: str) -> None:
    assert seen.console == []
    plots = len(re.findall(r'class="plot"', text))
    assert plots == 11
    assert f'data-drawn="{plots}"' in seen.dom
    drawn = re.split(r'<div class="plot', seen.dom)[1:]
    assert len(drawn) == plots
    for plot in drawn:
        assert re.search(r"<svg", plot), plot[:200]
        assert re.search(r'<path aria-label="[^"]+" role="graphics-symbol"', plot), "no mark is drawn"
    assert len(re.findall(r'role="graphics-symbol"', seen.dom)) > 100


@needs_chromium
@pytest.mark.slow
def test_what_rows_hold_is_text_and_never_markup(seen: Seen) -> None:
    assert "<title>a &lt;b&gt; store: report</title>" in seen.dom
    elements = Links()
    elements.feed(seen.dom)
    assert elements.found == []
    assert "owned'" in seen.dom, "the task's name is shown"


@needs_chromium
@pytest.mark.slow
def test_a_console_that_speaks_is_noticed(tmp_path: Path) -> None:
    seen = look("<!doctype html><script>console.error('no'); nothing()</script>", tmp_path)
    assert any("no" in line for line in seen.console)
    assert any("nothing is not defined" in line for line in seen.console)


def test_the_page_loads_nothing_and_forbids_it(text: str) -> None:
    links = Links()
    links.feed(text)
    assert links.found == []
    assert "default-src 'none'" in text
    assert "unsafe-eval" not in text
    assert "@import" not in text
    assert "url(" not in text.partition("</style>")[0]


def test_the_script_is_made_once(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(**_: str) -> str:
        raise AssertionError("made again")

    made = bundle.library()
    assert made in text
    assert "</script" not in made
    with monkeypatch.context() as patch:
        patch.setattr(bundle.vl_convert, "javascript_bundle", never)
        assert bundle.library() == made
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAJSTORE_CACHE", str(tmp_path / "file"))
    assert bundle.library() == made, "where no cache can be, it is made again"
    monkeypatch.setenv("TRAJSTORE_CACHE", str(tmp_path / "new"))
    bundle.library()
    assert [path.suffix for path in (tmp_path / "new" / "report").iterdir()] == [".js"]


def test_the_facts_are_those_of_the_rows(facts: Facts) -> None:
    made = rows()
    assert facts.rows == len(made)
    assert facts.tokens == sum(2 + len(r.response_tokens) for r in made)
    assert facts.groups_count == 40
    assert facts.versions == 8
    done = [r for r in made if r.status is TrajectoryStatus.COMPLETED]
    assert facts.ages["rows"].sum() == len(done)
    assert facts.rewards["not_finite"].sum() == 1
    assert facts.length_histogram["rows"].sum() == len(made)
    by_end = dict(facts.length_histogram.group_by("ended").agg(rows="rows").iter_rows())
    assert sum(by_end["cut off"]) == sum(r.finish_reason == "length" for r in done)
    assert set(by_end) == {"finished", "cut off", "aborted"}
    assert all(
        a < b for a, b in zip(facts.length_histogram["low"], facts.length_histogram["high"], strict=True)
    )
    assert {f.check for f in facts.findings} >= {"nan-reward", "truncated", "not-completed"}
    assert list(facts.bytes.values()) == sorted(facts.bytes.values(), reverse=True)


def test_numbers_are_beside_the_plots(text: str, facts: Facts) -> None:
    for gap, rows_at, *_ in facts.ages.iter_rows():
        assert f"<td>{gap}</td><td>{rows_at:,}</td>" in text
    for row in facts.drift.to_dicts():
        assert f"<td>{row['abs_log_ratio']:.3f}</td>" in text
    assert "1 error" in text
    assert "<h3>1 error, " in text


def test_many_tasks_are_joined(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    made = [
        Trajectory(
            response_tokens=[1],
            version=PolicyVersion(0),
            source=f"s{i % 12:02}",
            status=TrajectoryStatus.COMPLETED,
        )
        for i in range(30)
    ]
    store.append(made)
    found = gather(store)
    assert found.rewards_by_task["task"].n_unique() == SHOWN_TASKS
    (other,) = found.rewards_by_task.filter(found.rewards_by_task["task"] == OTHER_TASKS)["rows"]
    assert found.rewards_by_task["rows"].sum() == 30
    assert other == 30 - 3 * (SHOWN_TASKS - 1)


@pytest.mark.parametrize(
    "made",
    [
        [],
        [Trajectory()],
        [
            Trajectory(
                prompt="only text", response="and no tokens", reward=1.0, status=TrajectoryStatus.COMPLETED
            )
        ],
        [Trajectory(response_tokens=[1], reward=math.nan, status=TrajectoryStatus.FAILED)] * 2,
    ],
    ids=["empty", "pending", "text", "failed"],
)
def test_a_store_with_little_in_it_has_a_page(made: list[Trajectory], tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    if made:
        store.append(made)
    assert f"<b>{len(made)}</b><span>rows</span>" in page(gather(store))


def plots(text: str) -> int:
    return len(re.findall(r'class="plot"', text))


def test_what_is_not_there_has_no_plot_and_no_number(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "text")
    store.append(
        [
            Trajectory(
                prompt="p",
                response=str(i),
                group_id=f"g{i // 4}",
                reward=float(i % 4 > i // 4),
                status=TrajectoryStatus.COMPLETED,
            )
            for i in range(16)
        ]
    )
    text = page(gather(store))
    for name in ("Lengths and ends", "Padding", "Version gaps", "Off-policy drift", "What a staleness"):
        assert f"<h2>{name}" not in text
    assert "bytes / row" in text
    assert "a token" not in text.partition("<h2>Bytes")[2]
    assert "Mean reward 0.375 of 16 rows" in text
    different = re.search(r"different responses</th></tr><tr>.*?<td>([^<]*)</td></tr>", text)
    assert different is not None
    assert different[1] == "–", "no token is known, so no response is the same as another"
    empty = page(gather(TrajectoryStore.create(tmp_path / "empty")))
    assert "<h3>There are no rows</h3>" in empty
    assert "<b>0 B</b>" in empty
    assert plots(empty) == 0


def test_one_point_is_told_and_not_drawn(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "one")
    store.append(
        [
            Trajectory(
                response_tokens=[1, 2],
                behavior_log_probs=[-1.0, -1.0],
                log_probs=[-1.25, -1.25],
                log_probs_version=3,
                reward=1.0,
                version=PolicyVersion(3),
                status=TrajectoryStatus.COMPLETED,
            )
            for _ in range(4)
        ]
    )
    text = page(gather(store))
    assert plots(text) == 1, "bytes"
    assert "No batch of these plans has padding" in text
    assert "|log-ratio| is 0.250 nats a token at gap 0</h3>" in text
    assert "Mean reward 1.000 of 4 rows" in text


def test_rewards_too_large_to_spread_are_told(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "huge")
    rewards = [1e300, -1e300, 5.0, math.inf]
    store.append(
        [
            Trajectory(group_id="g", response_tokens=[1], reward=r, status=TrajectoryStatus.COMPLETED)
            for r in rewards
        ]
    )
    text = page(gather(store))
    assert plots(text) == 2, "rewards and bytes: a standard deviation that is infinite has no place"
    assert "<td>inf</td>" in text
    assert re.search(r"\d{20}", text.partition("<script")[0]) is None, "no number is written out"


def test_many_versions_are_joined_and_nothing_is_lost(tmp_path: Path) -> None:
    made = [
        Trajectory(
            id=str(i),
            response_tokens=[1] * (1 + i % 5),
            reward=float(i),
            version=PolicyVersion(1000 + i) if i % 10 else None,
            source=f"a task of quite a long name, number {i % 3}",
            status=TrajectoryStatus.COMPLETED,
        )
        for i in range(300)
    ]
    store = TrajectoryStore.create(tmp_path / "many")
    store.append(made)
    facts = gather(store, at=1290)
    assert (facts.version_step, facts.gap_step) == (10, 10)
    known = [i for i in range(300) if i % 10]
    rewards = {v: (n, mean) for v, n, mean in facts.rewards["version_id", "rows", "reward"].iter_rows()}
    assert rewards.pop(None)[0] == 30
    assert rewards == {
        1000 + low: (9, pytest.approx(np.mean([i for i in known if low <= i < low + 10])))
        for low in range(0, 300, 10)
    }
    ages = {gap: n for gap, n, *_ in facts.ages.iter_rows()}
    assert ages.pop(None) == 30
    assert ages == {
        low: n for low in range(-10, 300, 10) if (n := sum(low <= 290 - i < low + 10 for i in known))
    }
    for limit, kept in facts.staleness["max_staleness", "rows"].iter_rows():
        assert kept == sum(290 - i <= limit for i in known), "a gate is exact at each limit that is shown"
    assert facts.staleness["rows"].max() == 270
    assert facts.mean_gap == pytest.approx(np.mean([290 - i for i in known]))
    assert facts.near == pytest.approx(2 / 300)
    assert sum(facts.lengths["rows"]) == sum(facts.outcomes["rows"]) == 300
    text = page(facts)
    assert "at version 1000 to 1009" in text
    assert "<td>-10 to -1</td>" in text
    heads = {f"<th>a task of…number {i}</th>" for i in range(3)}
    assert all(head in text for head in heads)
    assert gather(store.at(0)).version_step == 1


def test_tasks_that_look_alike_are_numbered(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "alike")
    store.append(
        [
            Trajectory(
                response_tokens=[1],
                version=PolicyVersion(i // 2),
                source=f"the very same start {'xy'[i % 2]} and the very same end",
                status=TrajectoryStatus.COMPLETED,
            )
            for i in range(8)
        ]
    )
    text = page(gather(store))
    assert "<th>the very s…same end</th><th>the very s…same end (2)</th>" in text


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], []),
        ([math.nan, math.inf], []),
        ([1.0, 0.0, 1.0, math.nan], [(0.0, 0.0, 1), (1.0, 1.0, 2)]),
        ([float(i) for i in range(25)], None),
    ],
)
def test_rewards_have_a_bar_each_or_bins(
    rewards: list[float], expected: list[tuple[float, float, int]] | None
) -> None:
    found = list(reward_histogram(pl.Series("reward", rewards, dtype=pl.Float64)).iter_rows())
    if expected is None:
        assert sum(n for *_, n in found) == len(rewards)
        assert all(low < high for low, high, _ in found)
        assert (found[0][0], found[-1][1]) == (min(rewards), max(rewards))
    else:
        assert found == expected


def test_an_earlier_snapshot(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    store.append(rows(8))
    store.append(rows(4))
    assert gather(store.at(1)).rows == 8
    assert gather(store.at(1)).snapshot == 1
