"""Planted faults: each a line of the real code exchanged for one that somebody shipped, and the gates that see it.

`planted` swaps the code of the very function that everybody calls and puts it back. The gates stand in gates.py.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from importlib import import_module

from flashspec_core.lab.exactness import CASES, ImpossibleResult
from flashspec_core.lab.fit import ALPHA, SAMPLES, judge, power
from flashspec_core.lab.gates import (
    SETTINGS,
    Report,
    case_findings,
    certify,
    engine_finding,
    enumeration_findings,
    expected,
    false_alarms,
    identity_findings,
    ks_finding,
    table_finding,
)
from flashspec_core.verify import METHODS


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Args:
        name: what is wrong, in words.
        home: "module:function", below flashspec_core.
        old, new: the text of the true code, and what stands there instead.
    """

    name: str
    home: str
    old: str
    new: str

    @property
    def in_engine(self) -> bool:
        """Whether only the engine's gates can see it."""
        return self.home.startswith("engine.")

    @property
    def methods(self) -> list[str]:
        """The rule that the name speaks of, else "token"."""
        return [method for method in METHODS if self.name.startswith(f"{method}:")] or ["token"]

    @property
    def function(self):
        """The true function whose line is exchanged."""
        module, _, path = self.home.partition(":")
        return inspect.unwrap(reduce(getattr, path.split("."), import_module(f"flashspec_core.{module}")))

    @property
    def diff(self) -> str:
        """Two lines: what was taken out and what was put in."""
        return f"{self.home}\n- {self.old}\n+ {self.new}"


_REFERENCE, _STEP = "verify.reference:", "engine.decode:Run._step"
MUTANTS = [
    Mutant(
        "temperature after the log-softmax",
        "verify.logits:logprobs",
        "warp(logits, sampling).log_softmax(-1)",
        "warp(logits.log_softmax(-1), sampling)",
    ),
    Mutant(
        "residual soft-maxed",
        "verify.logits:residual_logprobs",
        "log_excess(target_logprobs, draft_logprobs)",
        "(target_logprobs.exp() - draft_logprobs.exp()).clamp_min(0)",
    ),
    Mutant("recovered token drawn from p", _REFERENCE + "next_law", "law[fell] = ", "_ = "),
    Mutant(
        "bonus drawn from a residual",
        _REFERENCE + "next_law",
        "(num_accepted < num_drafted).nonzero()[:, 0]",
        "(num_accepted <= num_drafted).nonzero()[:, 0][: len(p) * q.shape[1]]; q = torch.cat([q, q[:, -1:]], dim=1)",
    ),
    Mutant(
        "residual of the row before",
        _REFERENCE + "next_law",
        "q[fell, num_accepted[fell]]",
        "q[fell, (num_accepted[fell] - 1).clamp_min(0)]",
    ),
    Mutant(
        "bonus of the row before",
        _REFERENCE + "next_law",
        "device=p.device), num_accepted]",
        "device=p.device), num_accepted.clamp_max(q.shape[1] - 1)]",
    ),
    Mutant("tokens kept after a rejection", _REFERENCE + "_prefix", ".cumprod(-1).sum(-1)", ".sum(-1)"),
    Mutant(
        "bonus written over the last accepted token",
        _REFERENCE + "_result",
        "position == accepted,",
        "position == accepted - (accepted == gamma).long(),",
    ),
    Mutant("p and q exchanged", _REFERENCE + "token_chances", "p_drafted - q_drafted", "q_drafted - p_drafted"),
    Mutant(
        "temperature and filters on the target only",
        _REFERENCE + "draft_logprobs",
        "warp(draft.logits, samplings)",
        "warp(draft.logits, [type(s)(temperature=1.0) for s in samplings])",
    ),
    Mutant(
        "filters on the draft only",
        _REFERENCE + "laws",
        "logprobs(target_logits, samplings)",
        "logprobs(target_logits, [type(s)(temperature=s.temperature) for s in samplings])",
    ),
    Mutant("u stuck at zero", _REFERENCE + "_stands", "log_uniforms <= log_chances", "log_chances <= 0"),
    Mutant("p = 0 passes where u is 0", _REFERENCE + "_stands", "& (log_chances > -math.inf) ", ""),
    Mutant("padding read as an id", _REFERENCE + "_stands", " & (token_ids >= 0)", ""),
    Mutant("draft and residual share their noise", _REFERENCE + "_drawn", "RECOVER", "1"),
    Mutant(
        "one u for all positions", "noise:log_uniforms", "(0, positions, 0, ACCEPT)", "(0, positions * 0, 0, ACCEPT)"
    ),
    Mutant("one u for all rows", "noise:log_uniforms", "philox(seeds[:, None]", "philox(0 * seeds[:, None]"),
    Mutant("silent fall-back to greedy", "verify:decide", "all(s.greedy for s in samplings)", "True"),
    Mutant(
        "block: the first failed u ends it",
        _REFERENCE + "verify_block",
        "stands * order",
        "stands.long().cumprod(1) * order",
    ),
    Mutant(
        "block: h is w",
        _REFERENCE + "block_chances",
        "torch.where(at == num_drafted[:, None], log_w[:, 1:], log_h)",
        "log_w[:, 1:]",
    ),
    Mutant("block: w not clamped at 1", _REFERENCE + "block_chances", ".clamp(max=0)", ""),
    Mutant("block: residual with w = 1", _REFERENCE + "next_law", "law[fell] + log_weight[fell, None]", "law[fell]"),
    Mutant(
        "drafts by argmax, q from a softmax",
        "engine.drafters:ModelDrafter.draft",
        "draw_draft(logits, sampling, noise, i, self.workspaces)",
        "greedy_ids(logits), draw_draft(logits, sampling, noise, i, self.workspaces)[1]",
    ),
    Mutant(
        "a drawn token discarded for its own confidence",
        "engine.decode:Run._draft",
        "ids = draft.token_ids.to(device)",
        "ids = draft.token_ids if draft.logits is None else torch.where((draft.logits.softmax(-1).gather("
        "-1, draft.token_ids[..., None])[..., 0] > 0.3).long().cumprod(1) > 0, draft.token_ids, -1)",
    ),
    Mutant(
        "arm chosen after its drafts were seen",
        "engine.decode:Run._draft",
        "draft = arm.drafter.draft(context, gamma, samplings, noise)",
        "a, *b = (x.drafter.draft(context, gamma, samplings, noise) for x in self.arms "
        "if hasattr(x.drafter, 'cached')); "
        "b = b[0] if b else a; first = (a.token_ids <= b.token_ids)[:, :1]; draft = a if a.logits is None else Draft("
        "torch.where(first, a.token_ids, b.token_ids), torch.where(first[..., None], a.logits, b.logits))",
    ),
    Mutant(
        "the drafter's cache lacks the bonus token",
        "engine.drafters:ModelDrafter.draft",
        "[list(ids) for ids in context.token_ids]",
        "[list(ids[:-1]) or list(ids) for ids in context.token_ids]",
    ),
    Mutant(
        "rejected drafts stay in an idle drafter's cache",
        "engine.kv_cache:CachedModel.logits",
        "min(common_prefix(held, ids), len(ids) - keep)",
        "len(ids) - keep",
    ),
    Mutant(
        "a position sees the drafts behind it",
        "engine.kv_cache:placed",
        "<= positions[:, None, :, None]",
        "<= positions[:, None, :, None].amax(2, keepdim=True)",
    ),
    Mutant("the noise of a step used again", _STEP, "seeds = step_seeds(seeds, self.num_steps)", "pass"),
    Mutant(
        "block: u keyed by position",
        _STEP,
        "log_uniforms(seeds, width)",
        "log_uniforms(torch.tensor([r.seed for r in rows], device=device), 512).gather("
        "1, torch.tensor([len(r.ids) for r in rows], device=device)[:, None] + torch.arange(width, device=device))",
    ),
    Mutant(
        "coupled: noise new at every step",
        _STEP,
        "positions = torch.tensor([len(row.ids) for row in rows], device=device)",
        "positions = torch.zeros_like(seeds); seeds = step_seeds(seeds, self.num_steps)",
    ),
    Mutant(
        "the token behind accepted ones is thrown away",
        "engine.rows:Row.commit",
        "for token_id in emitted:",
        "for token_id in emitted[: max(1, sum(t >= 0 for t in emitted) - 1)]:",
    ),
]


@contextmanager
def planted(mutant: Mutant):
    """Run the true functions with one line exchanged.

    Args: mutant: which.
    Raises: ValueError: the line is not there exactly once, so the mutant must follow the code.
    """
    for name in CASES:  # the gates' laws come from the true code
        for method in METHODS:
            expected(name, method)
    function = mutant.function
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise ValueError(f"expected {mutant.old!r} once in {mutant.home}, found it {source.count(mutant.old)} times")
    namespace = dict(function.__globals__)
    flags = __future__.annotations.compiler_flag
    exec(compile(source.replace(mutant.old, mutant.new), f"<{mutant.name}>", "exec", flags, True), namespace)
    true_code, function.__code__ = function.__code__, inspect.unwrap(namespace[function.__name__]).__code__
    try:
        yield
    finally:
        function.__code__ = true_code


def report(mutant: Mutant | None = None, num_rows: int = 20_000, engine_rows: int = 2048, seed: int = 0) -> Report:
    """The gates over the true code, or those before a mutant's layer, under the method that it names or "token".

    Args:
        mutant: None: the true code, all gates, all methods.
        num_rows, seed: see `certify`.
        engine_rows: texts of each engine gate.
    """
    both = mutant is None
    methods = METHODS if both else mutant.methods
    with nullcontext() if both else planted(mutant):
        findings = []
        if both or not mutant.in_engine:
            findings += [
                *enumeration_findings(methods),
                *certify(methods=methods, num_rows=num_rows, seed=seed).findings,
            ]
        if both or mutant.in_engine:
            findings += [*identity_findings(), *(table_finding(method, engine_rows, seed) for method in methods)]
    return Report(findings)


def table(num_rows: int = 20_000, engine_rows: int = 2048, seed: int = 0) -> dict[str, dict[str, bool]]:
    """Which gate sees which fault: the true code first, then every mutant.

    Args: num_rows, engine_rows, seed: see `report`.
    Returns: {name: {gate: red}}; a gate that another layer stands behind is left out.
    """
    rows = {"the true code": report(None, num_rows, engine_rows, seed).gates()}
    return rows | {mutant.name: report(mutant, num_rows, engine_rows, seed).gates() for mutant in MUTANTS}


def power_curves(mutant: Mutant, sizes, num_rows: int = 200_000) -> dict[str, list[float]]:
    """Chance of each gate to see a fault of the door, by number of samples, each at alpha .01.

    Args:
        mutant: one that the door's gates can see.
        sizes: numbers of texts; a gate that looks at some of them gets its share.
        num_rows: texts from which the faulty law is known, many more than the sizes.
    Returns: {gate: a power for each size}, of the setting that sees most; "KS" and "chi-square" look at the same
        first tokens of a vocabulary of 80.
    """
    with planted(mutant):
        ks = ks_finding(80, mutant.methods[0], num_samples=num_rows)
        found = [f for name in CASES for f in case_findings(name, mutant.methods[0], num_rows, 0, ALPHA)]
    found += [ks, judge("chi-square", "V 80", ks.counts, ks.law)]
    curves = {}
    for gate in ("KS", "chi-square", "joint", "accepted", "rejected", "bonus"):
        each = []
        for f in (f for f in found if f.gate == gate):
            share = f.counts.sum() / num_rows
            f.counts = f.counts if f.red else f.law  # where so many texts show nothing, their scatter is left
            each.append([power(f, max(1, round(size * share))) for size in sizes])
        if each:  # "coupled" has no laws given a rejection
            curves[gate] = max(each, key=sum)
    return curves


def main() -> None:
    """`make exactness`: certificates of 100 seeds, the engine on as many, false alarms, and the power of every gate."""
    fallen = Counter()
    for seed in range(100):
        findings = certify(seed=seed).findings
        findings.append(engine_finding(SETTINGS[seed % len(SETTINGS)], seed=seed, alpha=ALPHA))
        fallen.update((f.gate, f.red) for f in findings)
    print("the true code, 100 seeds: gate, findings, red ones (KS and engine at alpha .01, the others share .01)")
    for gate in dict.fromkeys(gate for gate, _ in fallen):
        print(f"  {gate:12}{fallen[gate, False] + fallen[gate, True]:7}{fallen[gate, True]:5}")
    for method in METHODS:
        print(" ", ks_finding(49_152, method))
    print("false alarms at alpha .01, 10,000 samples, 1,000 seeds drawn from the target's law")
    for name, share in false_alarms().items():
        print(f"  {name:32}{share:.3f}")
    print("power at 10,000 samples, alpha .01")
    for mutant in MUTANTS:
        if not mutant.in_engine:
            try:
                curves = power_curves(mutant, [SAMPLES])
            except ImpossibleResult:
                print(f"  {mutant.name:48}impossible ids, seen at once")
                continue
            print(f"  {mutant.name:48}" + "  ".join(f"{gate} {curve[0]:.2f}" for gate, curve in curves.items()))


if __name__ == "__main__":
    main()
