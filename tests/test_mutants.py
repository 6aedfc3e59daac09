"""lab/mutants.py: every planted fault turns a gate red, the true code none, and the code is put back."""

import pytest

import flashspec_core as fs
from flashspec_core.lab import gates, mutants
from flashspec_core.lab.mutants import MUTANTS, planted
from flashspec_core.verify import reference

DOOR = [m for m in MUTANTS if not m.in_engine]


def by_name(name):
    return next(m for m in MUTANTS if m.name == name)


def test_there_are_many_and_each_has_its_own_name():
    assert len(MUTANTS) >= 18 and len({m.name for m in MUTANTS}) == len(MUTANTS)


def test_the_true_code_passes_every_gate():
    report = mutants.report()
    assert report.passed, str(report)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_a_gate_turns_red(mutant):
    assert not mutants.report(mutant).passed, f"no gate sees: {mutant.diff}"


def test_the_seeds_gate_turns_red_before_a_planted_fault():
    with planted(by_name("recovered token drawn from p")):
        assert gates.ks_finding(80, "token").red
    assert not gates.ks_finding(80, "token").red


@pytest.mark.parametrize(
    "name, gate, blind",
    [
        ("one u for all positions", "joint", "KS"),  # THEORY: a test of the first token alone cannot see it
        ("draft and residual share their noise", "rejected", "accepted"),
        ("block: residual with w = 1", "enumeration", "KS"),
        ("p = 0 passes where u is 0", "edges", "joint"),
    ],
)
def test_which_gate_sees_what(name, gate, blind):
    seen = mutants.report(by_name(name)).gates()
    assert seen[gate] and not seen[blind]


def test_a_mutant_is_taken_out_again_even_after_an_error():
    code = reference.next_law.__code__
    with pytest.raises(RuntimeError), planted(by_name("recovered token drawn from p")):
        assert reference.next_law.__code__ is not code
        raise RuntimeError
    assert reference.next_law.__code__ is code


def test_a_mutant_whose_line_is_gone_is_refused():
    lost = mutants.Mutant("lost", "verify.reference:next_law", "no such line", "")
    with pytest.raises(ValueError, match="expected 'no such line' once in verify.reference:next_law, found it 0 times"):
        planted(lost).__enter__()


def test_the_table_is_one_call(monkeypatch):
    monkeypatch.setattr(mutants, "MUTANTS", [by_name("u stuck at zero"), by_name("coupled: noise new at every step")])
    table = mutants.table(num_rows=2000, engine_rows=256)
    assert list(table) == ["the true code", "u stuck at zero", "coupled: noise new at every step"]
    assert not any(table["the true code"].values()) and table["u stuck at zero"]["KS"]
    assert set(table["coupled: noise new at every step"]) == {"identity", "engine"}


def test_power_grows_with_the_samples_and_chi_square_sees_sooner_than_ks():
    curves = mutants.power_curves(by_name("temperature after the log-softmax"), [10, 30, 100, 1000], num_rows=20_000)
    assert set(curves) == {"KS", "chi-square", "joint", "accepted", "rejected", "bonus"}
    for gate in ("KS", "chi-square", "joint"):
        assert curves[gate][-1] > 0.99 and curves[gate] == sorted(curves[gate])


def test_what_is_planted_reaches_the_engine():
    target = gates.tiny_models()[0]
    run = dict(sampling=fs.Sampling(temperature=1.0), max_new_tokens=12, seed=3)
    true = fs.generate(target, fs.NGramDrafter(1), [1, 2, 1], **run).token_ids
    with planted(by_name("silent fall-back to greedy")):
        greedy = fs.generate(target, fs.NGramDrafter(1), [1, 2, 1], **run).token_ids
    assert greedy == fs.generate(target, fs.NGramDrafter(1), [1, 2, 1], max_new_tokens=12).token_ids != true
