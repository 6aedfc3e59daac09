"""lab/change_panel.py: sliders change the world, and the curves are regret.py's."""

import numpy as np

import flashspec_core as fs
from flashspec_core.lab import change_panel, regret


def test_curves_are_the_simulations():
    found = change_panel.curves([0.3, 0.7, 0.5], [0.7, 0.3, 0.5], 150, ["UCB1", "Thompson"], horizon=300, num_seeds=8)
    world = regret.change_points([[0.3, 0.7, 0.5], [0.7, 0.3, 0.5]], 300)
    run = regret.simulate(fs.UCB1(3, 1, (8,)), world, np.random.default_rng(2))
    np.testing.assert_allclose(found["UCB1"], run.regret.mean(1))
    assert list(found) == ["UCB1", "Thompson"] and len(found["Thompson"]) == 300


def test_every_policy_can_be_chosen_and_is_named_in_words():
    page = change_panel.curves_svg(change_panel.curves([0.2, 0.8], [0.8, 0.2], 50, change_panel.POLICIES, 100, 4), 50)
    assert page.count("<polyline") == len(change_panel.POLICIES) and "role='img'" in page
    assert all(f"{name}: " in page for name in change_panel.POLICIES)
    assert "<polyline" not in change_panel.curves_svg({}, 50)


def test_a_moved_slider_draws_another_world():
    box = change_panel.explorer(horizon=200, change=100)
    (_, after, rest), view = box.children[0].children, box.children[1]
    first = view.value
    after.children[0].value = 0.3
    second = view.value
    assert first != second
    rest.children[1].value = ("Thompson",)
    assert view.value.count("<polyline") == 1 and "UCB1" not in view.value
    rest.children[0].value = 0
    assert "M10.0 10V150" in view.value
