"""lab/live.py: a history without widgets, a panel driven by its controls, and faults that end as words."""

import math
import re
import time

import pytest
import torch
from conftest import OwnDrafter, greedy_ids, scripted

import flashspec_core as fs
from flashspec_core.lab import bench, live
from flashspec_core.records import DecodeStep


def step(number, arm, drafted, accepted, seconds=0.1):
    ids = list(range(accepted + 1))
    return DecodeStep(0, number, arm, ("n-gram", "off")[arm], 4, drafted, accepted, ids, "x", 0.0, seconds)


@pytest.fixture
def history():
    # drafted, accepted: 4, 2 (three tested), 4, 4 (four tested), 0, 0 (none)
    monitor = live.AcceptanceMonitor(["n-gram", "off"], 20.0)
    for one in (step(0, 0, 4, 2, 9.0), step(1, 0, 4, 4), step(2, 1, 0, 0)):
        monitor.add(one)
    return monitor


def test_rates_positions_pulls_and_speed_by_hand(history):
    assert history.rates == [2 / 3, 6 / 7, 6 / 7]
    assert history.by_position == [(2, 2), (2, 2), (1, 2), (1, 1)]
    assert history.pulls == [2, 1] and history.arm_rates[0] == 6 / 7 and math.isnan(history.arm_rates[1])
    assert history.tokens_per_step == (3 + 5 + 1) / 3
    assert history.tokens_per_second == pytest.approx(6 / 0.2)  # the step that read the prompt is left out
    assert math.isnan(live.AcceptanceMonitor(["off"]).tokens_per_second)


def test_a_history_can_be_cut_back_and_forth(history):
    assert history.upto(1).rates == [2 / 3] and history.upto(0).rates == []
    assert history.upto(3) == history


def test_the_picture_has_words_points_and_no_script(history):
    page = live.monitor_svg(history)
    assert "role='img'" in page and "aria-label='acceptance rate 0.86 after 3 steps" in page and "data-n='3'" in page
    assert page.count("class='fs-point'") == 3 and "n-gram: 2, 0.86" in page and "<script" not in page
    assert "none yet" in live.monitor_svg(history.upto(0))
    many = live.AcceptanceMonitor(["n-gram"])
    for i in range(2000):
        many.add(step(i, 0, 4, 2))
    assert live.monitor_svg(many).count("fs-point") <= 400  # thinned, so a frame stays cheap


def test_beliefs_are_means_and_upper_ends():
    ucb, thompson = fs.UCB1(2), fs.ThompsonSampling(2)
    for policy in (ucb, thompson):
        for arm, reward in ((0, 0.5), (1, 1.0), (0, 0.5)):
            policy.update(arm, reward)
    (mean, upper), (best, _) = live.belief_of(ucb, "ab").values()
    assert (mean, best) == (0.5, 1.0) and upper == 1.0
    (mean, upper), _ = live.belief_of(thompson, "ab").values()
    assert mean == 0.5 and 0.5 < upper < 1
    assert live.belief_of(fs.FixedArm(0), "a") == {} == live.belief_of(None, "a")


@pytest.fixture
def panel(llama):
    truth = [1, 2, 3, *greedy_ids(llama, [1, 2, 3], 40)]
    right, wrong = scripted(truth), OwnDrafter(lambda ids, gamma, vocab: [0] * gamma)
    right.name, wrong.name = "right", "wrong"
    made = live.LivePanel(llama, [right, wrong], 10.0, 24)
    made.controls["prompt"].value = "1 2 3"
    made.truth = truth
    return made


def words(panel):
    return re.sub(r"<[^>]+>", "", panel.message.value)


def test_play_writes_what_generate_writes_and_leaves_it_to_be_scrubbed(panel):
    monitor = panel.play()
    ids = [token_id for s in monitor.steps for token_id in s.token_ids]
    assert ids == panel.truth[3:27] and words(panel) == "done: length"
    assert panel.view.position.max == panel.view.position.value == len(monitor.steps)
    assert f"data-n='{len(monitor.steps)}'" in panel.view.history.value and "data-n='24'" in panel.view.text.value
    panel.view.position.value = 1
    assert (
        "data-n='1'" in panel.view.history.value
        and f"data-n='{len(monitor.steps[0].token_ids)}'" in panel.view.text.value
    )
    panel.view.position.value = len(monitor.steps)
    assert "data-n='24'" in panel.view.text.value


def test_step_takes_one_and_a_changed_control_holds_from_the_next(panel):
    panel.controls["arms"].value = ("right",)
    panel.buttons["Step"].click()
    assert len(panel.monitor.steps) == 1 and words(panel) == "paused" and panel.monitor.steps[0].gamma == 4
    panel.controls["gamma"].value = 2
    panel.buttons["Step"].click()
    assert panel.monitor.steps[1].gamma == 2 and panel.monitor.steps[1].num_draft_tokens == 2
    panel.controls["arms"].value = ("wrong", "off")
    panel.controls["method"].value = "block"
    panel.controls["temperature"].value = 0.7
    panel.buttons["Step"].click()
    assert panel.monitor.steps[2].drafter == "wrong" and panel.run.policy.num_arms == 2
    assert panel.run.options.method == "block" and panel.run.rows[0].sampling == fs.Sampling(0.7)
    # a step keeps its arm's name, though the arms that are offered have changed since
    assert panel.monitor.arms == ["right", "wrong", "off"] and panel.monitor.pulls == [2, 1, 0]
    assert set(panel.monitor.beliefs[1]) == {"right"} and set(panel.monitor.beliefs[2]) == {"wrong", "off"}
    panel.buttons["Stop"].click()
    assert words(panel) == "stopped"
    panel.buttons["Step"].click()  # a new text
    assert len(panel.monitor.steps) == 1


def wait_for(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_run_pause_and_stop_are_heard_while_it_runs(panel):
    slow = panel.drafters["right"].draft
    panel.drafters["right"].draft = lambda *arguments: (time.sleep(0.05), slow(*arguments))[1]
    panel.controls["arms"].value = ("right",)
    panel.controls["gamma"].value = 1
    panel.buttons["Run"].click()
    assert wait_for(lambda: len(panel.monitor.steps) >= 2)
    panel.buttons["Pause"].click()
    assert wait_for(lambda: words(panel) == "paused")
    seen = len(panel.monitor.steps)
    panel.buttons["Run"].click()
    assert wait_for(lambda: len(panel.monitor.steps) > seen)
    panel.buttons["Stop"].click()
    assert wait_for(lambda: words(panel) == "stopped")
    assert len(panel.monitor.steps) < 12


def test_a_fault_in_the_loop_becomes_a_message_and_the_panel_lives_on(panel):
    def broken(*_):
        raise RuntimeError("the <drafter> broke")

    whole, panel.drafters["wrong"].draft = panel.drafters["wrong"].draft, broken
    panel.controls["arms"].value = ("wrong",)
    panel.buttons["Step"].click()
    assert "role='alert'" in panel.message.value
    assert words(panel) == "RuntimeError: the &lt;drafter&gt; broke"
    panel.drafters["wrong"].draft = whole
    panel.play()
    assert words(panel) == "done: length"


def test_no_arm_chosen_is_plain_decoding_and_domains_bring_their_prompts(panel):
    panel.controls["arms"].value = ()
    assert {s.drafter for s in panel.play().steps} == {"off"}
    panel.controls["domain"].value = "code"
    assert "Python" in panel.controls["prompt"].value


def test_a_bundle_shows_a_picture_where_widgets_cannot_be_drawn(panel):
    data = live.bundle(panel.widget, "The panel.", "<svg></svg>")
    assert data["text/plain"] == "The panel." and "<svg></svg><figcaption>The panel." in data["text/html"]
    assert any(mime.endswith("widget-view+json") for mime in data)

    class Old:
        model_id = "abc"

    view = live.bundle(Old(), "t", "h")["application/vnd.jupyter.widget-view+json"]
    assert view == {"version_major": 2, "version_minor": 0, "model_id": "abc"}


def test_the_panels_text_does_not_hang_on_torchs_random_state(panel):
    torch.manual_seed(0)
    panel.controls["temperature"].value = 1.0
    first = [s.token_ids for s in panel.play().steps]
    torch.manual_seed(1)
    assert [s.token_ids for s in panel.play().steps] == first


def test_a_saved_trace_is_scrubbed_with_its_noise(llama, panel, tmp_path):
    drafter = panel.drafters["right"]
    out = fs.generate(llama, [drafter, fs.Arm(None)], [1, 2, 3], gamma=3, max_new_tokens=12, trace=True)
    out.save(tmp_path / "trace.json")
    view = live.trace_view(fs.Generation.load(tmp_path / "trace.json"), None)
    assert view.position.max == view.position.value == len(out.steps) and view.monitor.arms == ["right", "off"]
    assert "data-n='12'" in view.text.value and " (p " in view.text.value
    view.position.value = 1
    assert f"data-n='{len(out.steps[0].token_ids)}'" in view.text.value and "data-n='1'" in view.history.value
    view.position.value = len(out.steps)
    assert "data-n='12'" in view.text.value


def test_the_panels_cost_is_measured_in_turn(llama):
    class Ids:  # a tokenizer of digits, so that prompts of words are ids
        def apply_chat_template(self, *_, **__):
            return type("", (), {"input_ids": [1, 2, 3]})

        def decode(self, ids, **_):
            return " ".join(map(str, ids))

    rows = bench.panel_rows(fs.Target(llama.model, Ids()), [fs.NGramDrafter()], repeat=2)
    assert [row["note"] for row in rows] == ["panel on", "panel off"]
    assert all(row["num_repeats"] == 2 and row["p50"] > 0 and row["benchmark"] == "panel" for row in rows)
