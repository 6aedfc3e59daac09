"""The records: what settings are refused and how, and what a step and a generation say of themselves."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest

import flashspec_core as fs
from flashspec_core.records import GREEDY_TEMPERATURE, DecodeStep, check_gamma


def make_step(num_draft_tokens, num_accepted, token_ids, seconds=0.5, **fields):
    return DecodeStep(0, 0, 0, "d", 4, num_draft_tokens, num_accepted, token_ids, "", 0.0, seconds, **fields)


def make_generation(steps, seconds=2.0):
    ids = [i for step in steps for i in step.token_ids]
    return fs.Generation("", ids, [1], steps, 0, "length", seconds)


@pytest.mark.parametrize(
    "field, value",
    [
        *(("temperature", v) for v in (-1, -1e-9, math.nan, math.inf, None, "warm", True, 10**400)),
        *(("top_p", v) for v in (0, -0.1, 1.0001, math.nan, "all", True)),
        *(("top_k", v) for v in (0, -3, 2.5, math.inf, math.nan, "3", True)),
        *(("min_p", v) for v in (-0.1, 1.1, math.nan, "0", False)),
        ("temperature", np.array([0.5, 1.0])),
    ],
)
def test_sampling_refuses_and_names_field_and_value(field, value):
    with pytest.raises(ValueError) as error:
        fs.Sampling(**{field: value})
    assert str(error.value).startswith(f"{field} must be ") and str(error.value).endswith(f", got {value!r}")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_p": 1, "top_k": 1, "min_p": 0},
        {"temperature": 2, "top_p": 1e-9, "top_k": 10**6, "min_p": 1.0},
        {"temperature": np.float32(0.5), "top_p": np.float64(0.5), "top_k": np.int64(3)},
    ],
)
def test_sampling_keeps_what_is_in_range(fields):
    sampling = fs.Sampling(**fields)
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling == dataclasses.replace(sampling)


def test_default_is_greedy_without_filters():
    assert fs.Sampling() == fs.Sampling(temperature=0.0, top_p=None, top_k=None, min_p=None)


@pytest.mark.parametrize(
    "temperature, greedy", [(0, True), (9.99e-6, True), (GREEDY_TEMPERATURE, False), (1e-4, False), (1.0, False)]
)
def test_greedy_is_below_the_one_threshold(temperature, greedy):
    assert fs.Sampling(temperature=temperature).greedy is greedy


def test_sampling_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        fs.Sampling().temperature = 1.0


@pytest.mark.parametrize("gamma", [0, -1, 1.0, 2.5, math.nan, "4", None, True])
def test_gamma_is_a_whole_number_of_at_least_one(gamma):
    with pytest.raises(ValueError, match=r"gamma must be a whole number >= 1 .*fs\.Arm\(None\)"):
        check_gamma(gamma)


@pytest.mark.parametrize("gamma", [1, 8, np.int64(4)])
def test_gamma_comes_back_as_int(gamma):
    assert check_gamma(gamma) == gamma and type(check_gamma(gamma)) is int


def test_arm_checks_gamma_and_has_a_name():
    with pytest.raises(ValueError, match="gamma"):
        fs.Arm(None, gamma=0)
    assert fs.Arm(None).name == "off" and fs.Arm(None).gamma is None
    assert fs.Arm(type("D", (), {"name": "eagle"})(), gamma=3).name == "eagle"


@pytest.mark.parametrize(
    "drafted, accepted, ids, fates",
    [
        (0, 0, [7], ["plain"]),
        (3, 0, [7], ["recovered"]),
        (3, 2, [5, 6, 7], ["accepted", "accepted", "recovered"]),
        (2, 2, [5, 6, 7], ["accepted", "accepted", "bonus"]),
        (3, 3, [5, 6], ["accepted", "accepted"]),  # cut behind an end of sequence
        (3, 3, [], []),
    ],
)
def test_fates_name_each_emitted_token(drafted, accepted, ids, fates):
    assert make_step(drafted, accepted, ids).fates == fates


def test_speed_counts_emitted_tokens():
    assert make_step(4, 1, [5, 6], seconds=0.5).tokens_per_second == 4.0
    assert make_step(4, 1, [5, 6], seconds=0.0).tokens_per_second == math.inf
    out = make_generation([make_step(4, 1, [5, 6]), make_step(4, 4, [1, 2, 3, 4, 5])], seconds=2.0)
    assert out.tokens_per_second == 3.5 and out.tokens_per_step == 3.5
    assert make_generation([make_step(4, 1, [5, 6])], seconds=0.0).tokens_per_second == math.inf


def test_rate_counts_tested_tokens_and_fraction_counts_drafted_ones():
    # gamma 4: rejected at 1, all stood, rejected at 0, nothing drafted -> 5 accepted, 7 tested, 12 drafted
    steps = [make_step(4, 1, [5, 6]), make_step(4, 4, [1, 2, 3, 4, 5]), make_step(4, 0, [9]), make_step(0, 0, [9])]
    out = make_generation(steps)
    assert out.acceptance_rate == 5 / 7 and out.accepted_fraction == 5 / 12
    assert out.arms == [0, 0, 0, 0]


@pytest.mark.parametrize("steps", [[], [make_step(0, 0, [9])]])
def test_without_drafts_there_is_no_rate(steps):
    out = make_generation(steps)
    assert math.isnan(out.acceptance_rate) and math.isnan(out.accepted_fraction)
    assert math.isnan(out.tokens_per_step) is (not steps)


def test_a_trace_is_plain_json():
    step = make_step(2, 1, [5, 6], draft_token_ids=[5, 8], log_uniforms=[-0.1, -0.2])
    assert DecodeStep(**json.loads(json.dumps(dataclasses.asdict(step)))) == step


def test_a_saved_generation_loads_equal(tmp_path):
    step = make_step(2, 1, [5, 6], target_logprobs=[-math.inf, -0.5], log_uniforms=[-0.1, -0.2], logprobs=[-1.0, -0.1])
    out = dataclasses.replace(make_generation([step, make_step(0, 0, [9], logprobs=[-3.0])]), text="inf \u00e9\u2603")
    out.save(tmp_path / "trace.json")
    loaded = fs.Generation.load(tmp_path / "trace.json")
    assert loaded == out and loaded.steps[0].target_logprobs[0] == -math.inf
    assert loaded.logprobs == [-1.0, -0.1, -3.0] and make_generation([step, make_step(0, 0, [9])]).logprobs is None
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]  # nothing partial stays


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"format": 1}', '{"format": 2, "steps": []}', '{"steps": []}']
)
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match="expected a trace of format 1 in .*trace.json, got: "):
        fs.Generation.load(tmp_path / "trace.json")


def test_a_trace_of_another_format_is_refused(tmp_path):
    make_generation([make_step(0, 0, [9])]).save(tmp_path / "trace.json")
    (tmp_path / "trace.json").write_text((tmp_path / "trace.json").read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="expected a trace of format 1 in .*trace.json, got: format 2"):
        fs.Generation.load(tmp_path / "trace.json")


def test_records_import_no_torch_and_verify_stays_the_function():
    code = (
        "import sys, flashspec_core as fs; fs.Sampling(); fs.UCB1(2); assert 'torch' not in sys.modules\n"
        "import flashspec_core.verify; assert fs.verify is sys.modules['flashspec_core.verify'].verify\n"
        "import flashspec_core.verify.reference, importlib\n"
        "importlib.import_module('flashspec_core.verify.logits'); from flashspec_core import verify\n"
        "print(verify is fs.verify, type(fs.verify).__name__)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True function", done.stderr
