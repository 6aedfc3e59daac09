"""lab/slow.py: stages add up to what verification decides, and sliders move the words."""

import re

import pytest
from conftest import make_target

import flashspec_core as fs
from flashspec_core.lab import plots, slow


@pytest.mark.parametrize("seed", range(6))
def test_stages_tell_what_verify_decides(tiny, tiny_draft, seed):
    drafter = fs.ModelDrafter(tiny_draft["llama"])
    found, result = slow.stages(tiny["llama"], drafter, [1, 2, 3], 3, fs.Sampling(1.5), seed)
    accepted = int(result.num_accepted)
    assert len(found) == min(accepted + 1, 3) + 1
    ends = [re.search(r"it (stands|falls)$", stage.title)[1] for stage in found[:-1]]
    assert ends == ["stands"] * accepted + ["falls"] * (accepted < 3)
    for i, stage in enumerate(found[:-1]):
        q, p, chance, u = (float(v) for v in re.findall(r"\d\.\d+", stage.title))
        assert chance == pytest.approx(min(1, p / q), abs=0.05) or q < 0.05  # printed to three places
        assert (u <= chance + 0.006) if i < accepted else (u >= chance - 0.006)
    last = found[-1]
    assert last.title.startswith("bonus" if accepted == 3 else "recovered")
    assert last.tokens[last.chosen] == str(int(result.next_token_ids))
    texts = fs.generate(
        tiny["llama"], fs.Arm(drafter, 3), [1, 2, 3], sampling=fs.Sampling(1.5), seed=seed, max_new_tokens=4
    )
    assert texts.steps[0].token_ids[-1] == int(result.next_token_ids)


def test_the_last_stage_shows_what_the_target_has_over_the_draft():
    """A vocabulary of eight, so that each token has its bar in each stage."""
    target, drafter = (make_target(vocab=slow.NUM_BARS, seed=seed) for seed in (0, 1))
    fallen = 0
    for seed in range(6):
        found, result = slow.stages(target, fs.ModelDrafter(drafter), [1, 2, 3], 3, fs.Sampling(1.5), seed)
        if int(result.num_accepted) < 3:
            test, last = found[-2:]
            q, p = (dict(zip(test.tokens, test.laws[name], strict=True)) for name in ("draft q", "target p"))
            total = sum(max(0, p[token] - q[token]) for token in p)
            for token, law in zip(last.tokens, last.laws["residual"], strict=True):
                assert law == pytest.approx(max(0, p[token] - q[token]) / total, abs=1e-5)
            fallen += 1
    assert fallen


def test_pictures_and_their_twins(tiny, tiny_draft):
    found, _ = slow.stages(tiny["llama"], fs.ModelDrafter(tiny_draft["llama"]), [5], 2, fs.Sampling(1.0), 1)
    page = slow.stage_html(found, 0)
    assert "role='img'" in page and page.count("<rect") >= 2 * slow.NUM_BARS and "▸" in page
    assert len(plots.stages_figure(found).axes) == len(found)


def test_sliders_move_the_words():
    view = slow.explorer(0.75, 4, 0.0, 2.5)
    *sliders, shown = view.children
    assert "expected 3.05 tokens a step; measured here: 2.50; speed-up 3.05x (accepted fraction 0.51)" in shown.value
    sliders[1].value = 2
    assert "expected 2.31 tokens" in shown.value
    sliders[2].value = 0.5
    assert "speed-up 1.16x" in shown.value
    stages = [slow.Stage(f"stage {i}", ["a"], {"target p": [1.0]}, 0) for i in range(2)]
    slider, picture = slow.slow_motion(stages).children
    slider.value = 1
    assert "data-stage='1'" in picture.value and "stage 1" in picture.value
