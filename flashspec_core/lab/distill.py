"""Self-distillation: draft heads learn from dialogues that the target wrote what it would say.

Training goes on from its last checkpoint. It leaves out the writing (dialogues.py) and the heads (engine/heads.py).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from flashspec_core.engine.heads import KINDS, head_config, load_head, save_head, tapped
from flashspec_core.engine.models import load_target
from flashspec_core.lab import bench, dialogues
from flashspec_core.lab.dialogues import Dialogues


def most_frequent(written, size: int, always=()):
    """The ids that the target says most.

    Args: written: Dialogues; size: how many; always: ids that are kept in any case.
    Returns: [size] int64, sorted, and the share of the answers' ids that they cover.
    """
    said = np.concatenate([ids[start:] for ids, start in zip(written.ids, written.answers, strict=True)])
    counts = np.bincount(said, minlength=max(size, *(i + 1 for i in (0, *always)))).astype(np.float64)
    ranked = counts.copy()
    ranked[list(always)] = np.inf
    kept = np.sort(np.argsort(-ranked, kind="stable")[:size])
    return torch.from_numpy(kept), float(counts[kept].sum() / counts.sum())


def _cuts(lengths, num_tokens):
    """Where sorted lengths are cut, so that no group's longest times its size is above num_tokens."""
    cuts = [0]
    for i, length in enumerate(lengths):
        if length * (i + 1 - cuts[-1]) > num_tokens and i > cuts[-1]:
            cuts.append(i)
    return cuts[1:]


def batches(written, num_tokens: int, max_length: int, generator):
    """Dialogues of like length together, in random order, once.

    Args:
        written: Dialogues.
        num_tokens: of a batch, padding included.
        max_length: longer ones are cut.
        generator: a numpy Generator.
    Yields: ids [rows, length] int64, padded with 0; answer [rows, length] bool: ids of the answer.
    """
    lengths = np.array([min(len(ids), max_length) for ids in written.ids])
    order = np.argsort(lengths + generator.random(len(lengths)))
    groups = np.split(order, _cuts(lengths[order], num_tokens))
    for i in generator.permutation(len(groups)):
        rows, width = groups[i], lengths[groups[i]].max()
        ids, answer = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), bool)
        for j, row in enumerate(rows):
            ids[j, : lengths[row]] = written.ids[row][:width]
            answer[j, written.answers[row] : lengths[row]] = True
        yield torch.from_numpy(ids), torch.from_numpy(answer)


@torch.no_grad()
def read(target, head, ids):
    """What the target makes of a batch.

    Args: target: what `load_target` returns; head: whose layers and vocabulary count; ids: [rows, length].
    Returns: features [rows, length, layers * hidden] and logits of the trimmed vocabulary [rows, length, draft_vocab],
        both in the head's dtype; of all logits [rows, length, 3] float32: log-sum-exp at temperature 1 and at .7, and
        the largest.
    """
    model, c = target.model, head.config
    with tapped(model, c.layers) as seen:
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
    sums = []
    for part in states.split(max(1, 2**14 // ids.shape[1])):
        logits = model.get_output_embeddings()(part).float()
        sums.append(torch.stack([logits.logsumexp(-1), (logits / 0.7).logsumexp(-1), logits.amax(-1)], -1))
    features, dtype = torch.cat([seen[layer] for layer in c.layers], -1), head.rows.dtype
    return features.to(dtype), F.linear(states.to(dtype), head.rows), torch.cat(sums)


def unrolled(head, ids, features, depth: int):
    """A head's logits as in drafting: the first of a chain reads the target's features, the next ones its own output.

    Rule: chain t reads what is committed up to id t + 1; its k-th logits (k = 0, 1, ...) are of id t + 2 + k.

    Args: head: a Head; ids: [rows, length]; features: from `read`; depth: tokens a chain.
    Yields: [rows, length - 1 - k, draft_vocab] for k = 0..depth - 1.
    """
    length = ids.shape[1] - 1
    if head.config.kind == "medusa":
        every = head(features[:, :-1].flatten(0, 1), depth).unflatten(0, (len(ids), length))
        yield from (every[:, : length - k, k] for k in range(depth))
        return
    position = torch.arange(length, device=ids.device)
    past = position[:, None] >= position
    groups = head.config.num_heads // head.config.num_kv_heads
    own, keys, values = head.reduce(features[:, :-1]), [], []
    for k in range(depth):
        x = head.start(ids[:, 1 + k :], own[:, : length - k])
        size = x.shape[1]
        q, key, value = head.attend(x, (position[:size] + k).expand(len(ids), -1))
        keys.append(key.repeat_interleave(groups, 1))
        values.append(value.repeat_interleave(groups, 1))
        scores = (q @ keys[0].transpose(2, 3)).masked_fill(~past[:size], -torch.inf)
        chain = [(q * key[:, :, :size]).sum(-1, keepdim=True) for key in keys[1:]]
        weights = (torch.cat([scores, *chain], -1).float() / head.head_dim**0.5).softmax(-1).to(x.dtype)
        attended = weights[..., :length] @ values[0]
        for i, value in enumerate(values[1:]):
            attended = attended + weights[..., length + i : length + i + 1] * value[:, :, :size]
        own = head.finish(x, attended)
        yield head.logits(head.last_norm(own))


def chances(logits, target_logits, sums, temperature: float = 0.7):
    """How probable it is that each drafted token stands: the overlap of the two laws.

    Rule: sum over the trimmed vocabulary of min(p, q), both at the temperature; p is 0 nowhere else than it is.

    Args:
        logits, target_logits: [..., draft_vocab] of head and target.
        sums: [...] float32, the log-sum-exp of all the target's logits at that temperature.
    Returns: [...] float32.

    >>> chances(torch.zeros(2), torch.zeros(2), torch.tensor(2.0).log(), 1.0)
    tensor(1.)
    """
    p = (target_logits.float() / temperature - sums[..., None]).exp()
    return torch.minimum(p, (logits.float() / temperature).softmax(-1)).sum(-1)


def _chains(target, head, ids, answer, depth):
    """For each depth the head's logits, the target's and its sums (see read) where an answer's id is said."""
    features, target_logits, sums = read(target, head, ids)
    for k, logits in enumerate(unrolled(head, ids, features, depth)):
        said = answer[:, 2 + k :]
        at = slice(1 + k, ids.shape[1] - 1)
        yield logits[:, : said.shape[1]][said], target_logits[:, at][said], sums[:, at][said]


def _loss(chains, share: float):
    """Cross entropy at temperature 1, and by `share` minus the log of the acceptance rate, summed over depths."""
    loss = 0.0
    for logits, target_logits, sums in chains:
        law = (target_logits.float() - sums[:, :1]).exp()
        entropy = -(law * logits.float().log_softmax(-1)).sum(-1).mean()
        miss = -chances(logits, target_logits, sums[:, 1]).clamp_min(1e-4).log().mean()
        loss = loss + (1 - share) * entropy + share * miss
    return loss


@torch.no_grad()
def acceptance(
    target, head, written, depth: int | None = None, batch_tokens: int = 4096, max_length: int = 512
) -> dict:
    """What a head's tokens would meet with on the answers of some dialogues, each depth by itself.

    Args: target, head; written: Dialogues; depth: None: the head's; batch_tokens, max_length: see train.
    Returns: "acceptance_rate": a list, the mean overlap at temperature .7 a depth; "greedy": how often the head's
        likeliest id is the target's.
    """
    depth = depth or head.config.depth
    totals = torch.zeros(depth, 3, dtype=torch.float64)
    for ids, answer in batches(written, batch_tokens, max_length, np.random.default_rng(0)):
        ids, answer = ids.to(target.device), answer.to(target.device)
        for k, (q, p, sums) in enumerate(_chains(target, head, ids, answer, depth)):
            said = p.gather(-1, q.argmax(-1, keepdim=True))[:, 0].float() >= sums[:, 2] - 1e-3  # of all ids
            totals[k] += torch.tensor([len(q), float(chances(q, p, sums[:, 1]).sum()), float(said.sum())])
    rates = (totals[:, 1:] / totals[:, :1]).T.tolist()
    return {"acceptance_rate": rates[0], "greedy": rates[1]}


def _pace(share: float) -> float:
    """The learning rate's share of its largest: a short warm-up, then a cosine down to a twentieth."""
    return min(1.0, share / 0.03) * (0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2)


def _held_out(written, share: float):
    """What is learnt from, and every n-th dialogue that is measured on: Dialogues both."""
    if len(written.ids) < 2:
        raise ValueError(f"expected at least 2 dialogues, to learn from and to measure on, got {len(written.ids)}")
    every = min(len(written.ids), max(2, round(1 / share)))
    return tuple(
        Dialogues(*zip(*((written.ids[i], written.answers[i]) for i in rows), strict=True))
        for rows in ([i for i in range(len(written.ids)) if i % every], range(0, len(written.ids), every))
    )


def train(
    target,
    written,
    kind: str = "eagle",
    *,
    epochs: int = 3,
    depth: int = 4,
    draft_vocab: int = 8192,
    layers=None,
    intermediate_size: int | None = None,
    learning_rate: float = 1e-3,
    batch_tokens: int | None = None,
    max_length: int = 512,
    held_out: float = 0.02,
    num_measured: int = 8,
    checkpoint=None,
    seed: int = 0,
    progress: bool = True,
):
    """Teach a head what the target would say, unrolled as it drafts.

    Rule: at each depth cross entropy with the target's law at temperature 1, passing over linearly into minus the log
    of the acceptance rate at .7; AdamW with a cosine after a short warm-up; depths count alike.

    Args:
        target: what `load_target` returns.
        written: from dialogues.write; a share of `held_out`, evenly taken, is measured on and not learnt from.
        kind, depth, layers, intermediate_size: see heads.head_config.
        epochs: rounds over the data.
        draft_vocab: ids that the head can say.
        learning_rate, batch_tokens, max_length: of a step; None: by device.
        num_measured: points of the curve.
        checkpoint: a file that the state is kept in after every point, and taken up from; or None.
        seed: of the order and the start.
        progress: show a bar.
    Returns: The head, and a dict: "curve" (a list of {"tokens", "acceptance_rate", "greedy"}), "coverage" (of the
        answers' ids by the trimmed vocabulary), "num_tokens", "seconds".
    Cost: on one H200 about 15 s for 10 million ids and round; on two CPU cores about 500 ids a second.
    """
    from tqdm.auto import tqdm

    cuda = target.device.type == "cuda"
    batch_tokens = batch_tokens or (24_576 if cuda else 768)
    learnt, kept = _held_out(written, held_out)
    vocab_ids, coverage = most_frequent(learnt, min(draft_vocab, target.vocab_size), target.eos_token_ids)
    config = head_config(target, kind, layers=layers, depth=depth, intermediate_size=intermediate_size)
    torch.manual_seed(seed)
    head = KINDS[kind](config, target, vocab_ids).float()
    optimizer = torch.optim.AdamW(head.parameters(), learning_rate, (0.9, 0.95), weight_decay=0.01)
    order = lambda epoch: batches(learnt, batch_tokens, max_length, np.random.default_rng([seed, epoch]))  # noqa: E731
    lengths = np.sort([min(len(ids), max_length) for ids in learnt.ids])
    num_steps = epochs * (1 + len(_cuts(lengths, batch_tokens)))
    curve, step, done, start = [], 0, 0, time.perf_counter()
    said = hashlib.sha256(np.concatenate(learnt.ids).tobytes() + vocab_ids.numpy().tobytes()).hexdigest()
    made = repr((config, said, epochs, learning_rate, batch_tokens, max_length, seed))
    if checkpoint and Path(checkpoint).exists():
        state = torch.load(checkpoint, map_location=target.device, weights_only=True)
        if state["made"] != made:
            raise ValueError(f"{checkpoint} is of other data or settings; delete it, or take another name or seed")
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        curve, done, start = state["curve"], state["step"], start - state["seconds"]
    with tqdm(total=num_steps, desc=f"{kind} learns", disable=not progress) as bar:
        for epoch in range(epochs):
            for ids, answer in order(epoch):
                step += 1
                bar.update()
                if step <= done:
                    continue
                ids, answer, share = ids.to(target.device), answer.to(target.device), step / num_steps
                optimizer.param_groups[0]["lr"] = learning_rate * _pace(share)
                with torch.autocast(target.device.type, torch.bfloat16, enabled=cuda):
                    loss = _loss(_chains(target, head, ids, answer, depth), share) / depth
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                optimizer.step()
                if step % max(1, num_steps // num_measured) == 0 or step == num_steps:
                    head.eval()
                    with torch.autocast(target.device.type, torch.bfloat16, enabled=cuda):
                        rates = acceptance(target, head, kept, depth, max_length=max_length)
                    curve.append({"tokens": step * learnt.num_tokens * epochs // num_steps, **rates})
                    bar.set_postfix_str(" ".join(f"{rate:.2f}" for rate in rates["acceptance_rate"]))
                    head.train()
                    if checkpoint:
                        state = dict(
                            head=head.state_dict(), optimizer=optimizer.state_dict(), curve=curve, step=step, made=made
                        )
                        torch.save({**state, "seconds": time.perf_counter() - start}, f"{checkpoint}.partial")
                        Path(f"{checkpoint}.partial").replace(checkpoint)
    report = {"curve": curve, "coverage": coverage, "num_tokens": learnt.num_tokens}
    return head.to(target.dtype).eval().requires_grad_(False), {**report, "seconds": time.perf_counter() - start}


def distil(
    target,
    name: str,
    domain: str,
    kind: str,
    num_tokens: int,
    out,
    folder,
    held_out_tokens: int,
    seed: int = 0,
    progress: bool = True,
    **options,
):
    """Write, teach, measure and keep one head with its card.

    Args:
        target: what `load_target` returns.
        name: of the head.
        domain, num_tokens, folder, seed, progress: see dialogues.write.
        kind, options: see train.
        out: folder of NAME.safetensors and NAME.json; a checkpoint lies in `folder` until the head is there.
        held_out_tokens: written with another seed in each domain, to measure on.
    Returns: The card, a dict.
    """
    folder, environment = Path(folder), bench.environment()
    write = functools.partial(dialogues.write, target, folder=folder, progress=progress)
    written = write(domain, num_tokens, seed=seed)
    checkpoint = folder / f"{name}-{seed}.checkpoint"
    head, report = train(target, written, kind, seed=seed, checkpoint=checkpoint, progress=progress, **options)
    Path(out).mkdir(parents=True, exist_ok=True)
    path = Path(out) / f"{name}.safetensors"
    card = {
        "name": name,
        "target": target.name,
        "data": f"{domain}: dialogues that the target wrote itself, the user's turns too",
        "seed": seed,
        "options": options,
        **report,
        **environment,
    }
    save_head(head, path, card)
    head = load_head(path, target)  # what is measured is what is kept, in eight bits
    card["held_out"] = {
        other: acceptance(target, head, write(other, held_out_tokens, seed=seed + 1)) for other in dialogues.OPENERS
    }
    save_head(head, path, card)
    checkpoint.unlink()
    return card


def main(arguments=None) -> None:
    """python -m flashspec_core.lab.distill --domain code ...; Args: arguments: a list, or None: the command's."""
    parser = argparse.ArgumentParser(prog="python -m flashspec_core.lab.distill", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m", help="as in load_target")
    parser.add_argument("--domain", default="mixed", choices=[*dialogues.OPENERS, "mixed"])
    parser.add_argument("--kind", default="eagle", choices=list(KINDS))
    parser.add_argument("--name", help="default: KIND-DOMAIN")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="ids that the target writes")
    parser.add_argument("--held-out", type=int, default=50_000, help="ids a domain to measure on")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--intermediate-size", type=int, help="of an eagle's layer; default: twice the hidden size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="as in load_target")
    parser.add_argument("--folder", default="distilled", help="where dialogues and checkpoints are kept")
    parser.add_argument("--out", default="distilled", help="where the head goes")
    o = parser.parse_args(arguments)
    card = distil(
        load_target(o.target, o.dtype),
        o.name or f"{o.kind}-{o.domain}",
        o.domain,
        o.kind,
        o.tokens,
        o.out,
        o.folder,
        o.held_out,
        o.seed,
        epochs=o.epochs,
        draft_vocab=o.draft_vocab,
        intermediate_size=o.intermediate_size,
    )
    for domain, rates in card["held_out"].items():
        print(domain, "acceptance rate by depth:", " ".join(f"{rate:.2f}" for rate in rates["acceptance_rate"]))


if __name__ == "__main__":
    main()
