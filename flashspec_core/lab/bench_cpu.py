"""Whole answers on a CPU: every drafter by domain and temperature, beside untouched transformers and flashspec 0.3.1.

One prompt after another, all ways in turn on each, so that a slow moment hits all. It leaves out the kernels.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass

import torch

from flashspec_core.engine.decode import generate
from flashspec_core.engine.drafters import CascadeDrafter, EarlyExitDrafter, NGramDrafter
from flashspec_core.engine.head_drafters import load_drafter
from flashspec_core.engine.models import load_target
from flashspec_core.engine.text import encode_prompts
from flashspec_core.lab import bench, workloads
from flashspec_core.records import Arm, Generation, Sampling

GAMMAS = {"medusa-mixed": 2, "eagle-chat": 3, "eagle-code": 6, "eagle-mixed": 4}
TEMPERATURES = (0.0, 0.7)


@dataclass
class Way:
    """One way to an answer.

    Args:
        provider, gamma, note: of its rows.
        answer: f(ids [1, length] int64, num_tokens, temperature) -> new ids, or the Generation that holds them.
    """

    provider: str
    answer: object
    gamma: int | str = ""
    note: str = ""


def own_arms(target, gammas=GAMMAS) -> dict[str, Arm]:
    """Plain decoding, n-grams and each head, by name.

    Args: target: what `load_target` returns; gammas: {name of a head: drafted tokens}.
    """
    arms = {"off": Arm(None), "n-gram": Arm(NGramDrafter(), 8)}
    return arms | {name: Arm(load_drafter(name, target), gamma) for name, gamma in gammas.items()}


def own_ways(target, gammas=GAMMAS) -> list[Way]:
    """Each of `own_arms`, and n-grams with the last head behind them, as rows of this package.

    Args: target, gammas: see own_arms.
    """
    arms = own_arms(target, gammas)
    both = CascadeDrafter(arms["n-gram"], list(arms.values())[-1])
    arms[both.name] = Arm(both, 8)

    def answer(ids, num_tokens, temperature, arm):
        return generate(target, arm, ids[0].tolist(), max_new_tokens=num_tokens, sampling=Sampling(temperature))

    return [
        Way("flashspec_core", lambda *a, arm=arm: answer(*a, arm=arm), arm.gamma or "", name)
        for name, arm in arms.items()
    ]


def transformers_answer(model):
    """transformers' own generate as a way answers. Args: model: of transformers.

    Returns: f(ids [1, length], num_tokens, temperature, **options) -> new ids.
    """

    def answer(ids, num_tokens, temperature, **options):
        law = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
        law |= dict(attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)
        return model.generate(input_ids=ids, **law, **options)[0, ids.shape[1] :].tolist()

    return answer


def assistant_of(plain, num_layers: int):
    """A model's first layers as transformers' assistant, asked for four tokens at a time.

    Args: plain: of transformers; num_layers: from the first.
    """
    assistant = EarlyExitDrafter(plain, num_layers).cached.model
    own = copy.deepcopy(plain.generation_config)  # read there, and nowhere else
    own.num_assistant_tokens, own.num_assistant_tokens_schedule, own.assistant_confidence_threshold = 4, "constant", 0.0
    assistant.generation_config = own
    return assistant


def older_ways(target, model, make_drafter, note: str, **settings) -> list[Way]:
    """flashspec 0.3.1 with one drafter, where it is installed.

    Args:
        target: what `load_target` returns.
        model: of transformers, with its weights.
        make_drafter: f(flashspec.engine) -> one of its drafters.
        note: of its rows.
        settings: of its FlashSpecConfig.
    """
    try:
        import flashspec
        from flashspec import engine
    except ImportError:
        return []
    wrapped = engine.TargetModel(str(target.path or target.name), target.device, target.dtype, model=model)
    drafter, engines = make_drafter(engine), {}

    def answer(ids, num_tokens, temperature):
        if hasattr(drafter, "set_temperature"):
            drafter.set_temperature(temperature)
        if temperature not in engines:
            config = flashspec.FlashSpecConfig(
                device=str(target.device),
                drafter_strategy="bandit",
                bandit=flashspec.BanditConfig(n_arms=1),
                sampling=flashspec.SamplingConfig(temperature=temperature, gamma=4, seed=0),
                **settings,
            )
            engines[temperature] = flashspec.SpeculativeEngine(config, [drafter], wrapped)
        out = engines[temperature].generate(ids, max_new_tokens=num_tokens)
        return out.output_ids[0, : out.n_tokens_generated].tolist()

    return [Way("flashspec-0.3.1", answer, 4, note)]


def peers(target, plain) -> list[Way]:
    """transformers' own ways on an untouched model, and flashspec 0.3.1 where it is installed.

    Args: target: what `load_target` returns; plain: a transformers model of the same weights.
    """
    answer, quarter = transformers_answer(plain), max(1, plain.config.num_hidden_layers // 4)
    assistant = assistant_of(plain, quarter)
    return [
        Way("transformers", answer),
        Way("transformers-prompt-lookup", lambda *a: answer(*a, prompt_lookup_num_tokens=10), 10),
        Way(
            "transformers-assisted",
            lambda *a: answer(*a, assistant_model=assistant),
            4,
            f"assistant: the first {quarter} layers",
        ),
        *older_ways(target, plain, lambda engine: engine.NgramDrafter(), "its n-gram drafter"),
    ]


def answer_rows(
    target, ways, num_tokens: int = 64, prompts=workloads.MEASURED, report=print, temperatures=TEMPERATURES
) -> list[dict]:
    """Tokens a second of every way, and of ours tokens a step and the acceptance rate too.

    Args:
        target: what `load_target` returns.
        ways: Ways.
        num_tokens: of an answer, which may end earlier.
        prompts: {domain: texts}.
        report: called with a line for each domain, temperature and way.
        temperatures: of the answers.
    Returns: Rows; their quantiles are over the prompts.
    """
    rows = []
    for domain, texts in prompts.items():
        ids = [encode_prompts(target, workloads.chat_messages(text))[0] for text in texts]
        inputs = [torch.tensor(each, device=target.device) for each in ids]
        for temperature in temperatures:
            speeds, outs = [[] for _ in ways], [[] for _ in ways]
            for number, ids in enumerate(inputs):
                for i, way in enumerate(ways):
                    if not number:
                        way.answer(ids, 8, temperature)  # the warm-up
                    call = lambda w=way, x=ids, t=temperature, o=outs[i]: o.append(w.answer(x, num_tokens, t))  # noqa: E731
                    (seconds,) = bench.measure(call, warmup=0, repeat=1)
                    speeds[i].append(len(getattr(outs[i][-1], "token_ids", outs[i][-1])) / seconds)
            for i, way in enumerate(ways):
                out = outs[i][0]
                graph = isinstance(out, Generation) and out.mode == "captured"
                cells = dict(mode="graph" if graph else "eager", batch=1, gamma=way.gamma, temperature=temperature)
                cells |= dict(domain=domain, method="token" if way.gamma else "plain", note=way.note)
                cells |= bench.model_cells(target)
                cells |= {"device": bench.cpu_name()} if target.device.type == "cpu" else {}
                values = {("tokens_per_second", "1/s"): speeds[i]}
                if isinstance(out, Generation) and way.gamma:
                    values["tokens_per_step", "1"] = [o.tokens_per_step for o in outs[i]]
                    rates = [o.acceptance_rate for o in outs[i]]
                    values["acceptance_rate", "1"] = [rate for rate in rates if rate == rate]  # NaN: none was tested
                new = [bench.row("decode", way.provider, *what, each, **cells) for what, each in values.items() if each]
                report(f"{domain}, {temperature}: {way.provider} {way.note} {new[0]['p50']:.1f} tokens/s")
                rows += new
    return rows


def main(arguments=None) -> None:
    """python -m flashspec_core.lab.bench_cpu FILE. Args: arguments: a list, or None: the command's."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(prog="python -m flashspec_core.lab.bench_cpu", description=__doc__.splitlines()[0])
    parser.add_argument("file", help="the CSV that rows are added to as they come")
    parser.add_argument("--dtype", help="default: the CPU's fast one")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--domains", nargs="+", default=list(workloads.MEASURED), choices=list(workloads.MEASURED))
    parser.add_argument("--temperatures", nargs="+", type=float, default=TEMPERATURES)
    o = parser.parse_args(arguments)
    target = load_target(dtype=o.dtype, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(target.path, dtype=target.dtype).eval()
    ways = own_ways(target) + peers(target, plain)
    for domain in o.domains:  # what has come is kept, whatever happens to the next
        prompts = {domain: workloads.MEASURED[domain]}
        bench.append_rows(answer_rows(target, ways, o.tokens, prompts, temperatures=o.temperatures), o.file)


if __name__ == "__main__":
    main()
