from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from segue_bench.charts import spread
from segue_bench.figures import percentile
from segue_bench.plan import CODEX, PRESETS, BenchPlan, cases, order
from segue_bench.server import parse_counters
from segue_bench.ways import WAYS
from segue_bench.workload import WorkloadMaker


def plan(**changes: object) -> BenchPlan:
    values: dict[str, object] = {
        "preset": "codex",
        "shape": CODEX,
        "ways": WAYS,
        "speeds": (65.0, 1_000.0),
        "contexts": (1_000, 20_000),
        "turns": 30,
        "repeat": 3,
        "seed": 1,
    }
    return BenchPlan(**{**values, **changes})  # type: ignore[arg-type]


def test_every_case_runs_as_often_as_asked_and_never_first_twice() -> None:
    groups = cases(plan())
    loops = list(order(groups, 3))
    assert all(loops.count(case) == 3 for group in groups for case in group)
    size = len(loops) // 3
    assert len({loops[n * size] for n in range(3)}) == 3


def test_slow_models_get_fewer_turns_and_no_rollout_of_one() -> None:
    cut = plan(sampling_s_max=1.0)
    assert cut.turns_at(65) == 1
    assert cut.turns_at(1_000) == 10
    assert cut.turns_at(0) == 30
    assert not [c for group in cases(cut) for c in group if c.way == "rollout" and c.turns < 2]


def test_presets_ask_for_what_the_issue_names() -> None:
    codex = PRESETS["codex"]
    assert codex.turns == 30
    assert codex.shape.output_tokens == 100
    assert codex.contexts[-1] == 100_000
    maker = WorkloadMaker(codex.shape, 1)
    assert 19_000 <= len(maker.tools) < 21_000
    assert codex.shape.instructions_bytes + codex.shape.tools_bytes == 32_000


def test_the_same_seed_tells_the_same_story() -> None:
    one, same, other = (WorkloadMaker(CODEX, seed).workload(5, 1.0, 3) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert len(one.outputs) == 3
    assert all(len(output) == 2_000 for output in one.outputs)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_a_value_that_enough_others_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) * 0.999999


@given(st.lists(st.floats(0, 300), min_size=1).map(sorted), st.floats(1, 30))
def test_labels_keep_their_order_and_their_distance(places: list[float], gap: float) -> None:
    moved = spread(places, gap)
    assert all(b - a >= gap - 1e-6 for a, b in pairwise(moved))


def test_counters_are_read_with_and_without_labels() -> None:
    page = (
        "# HELP segue_turns_total Turns\n"
        'segue_turns_total{outcome="completed",transport="http"} 2.0\n'
        'segue_turns_total{outcome="failed",transport="http"} 1.0\n'
        "segue_tokens_tokenized_total 12.0\n"
        'segue_turn_stage_seconds_sum{stage="render"} 0.5\n'
    )
    counters = parse_counters(page)
    assert counters.turns == 3
    assert counters.tokens_tokenized == 12
    assert counters.stage_s["render"] == 0.5
    assert counters.stage_s["save"] == 0
    assert counters.since(counters).tokens_tokenized == 0
