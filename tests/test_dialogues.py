"""lab/dialogues.py: what a target writes is what it would say, row by row and dialogue by dialogue; shards resume."""

import numpy as np
import pytest
import torch
from conftest import make_target, plain_logits

from flashspec_core.lab.dialogues import OPENERS, Dialogues, write

OPTIONS = dict(batch=2, steps=130, longest=(6, 12), temperatures=(0.0, 0.7), progress=False)


@pytest.fixture(scope="module")
def tiny(smollm2):
    """A tiny random target that speaks SmolLM2's ids."""
    target = make_target(vocab=49_152, layers=1)
    target.tokenizer = smollm2.tokenizer
    return target


def test_dialogues_have_the_templates_form_and_an_opener(smollm2, tiny, tmp_path):
    dialogues = write(tiny, "code", 100, tmp_path, **OPTIONS)
    assert len(dialogues.ids) >= 2
    for ids, answer in zip(dialogues.ids, dialogues.answers, strict=True):
        said = smollm2.tokenizer.decode(ids)
        user = said.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        assert user.startswith(tuple(OPENERS["code"]))
        assert said.count("<|im_end|>") == 2 + said.endswith("<|im_end|>")  # the last one of a row may have been cut
        assert smollm2.tokenizer.decode(ids[:answer]).endswith("<|im_start|>assistant\n")
        assert 1 <= len(ids) - answer <= 13


def test_a_greedy_row_says_what_the_target_says_whatever_stood_before_in_its_row(smollm2, tmp_path):
    dialogues = write(smollm2, "code", 100, tmp_path, seed=5, **{**OPTIONS, "temperatures": (0.0,)})
    assert len(dialogues.ids) > 2  # so some of them stand behind another in their row
    for ids, answer in zip(dialogues.ids, dialogues.answers, strict=True):
        logits = plain_logits(smollm2.model, ids.tolist(), len(ids) - answer + 1)[:-1]
        said = torch.from_numpy(ids[answer:]).long()
        best = logits.max(-1).values - logits.gather(1, said[:, None])[:, 0]
        assert (best[: len(best) - (len(said) == 13)] < 1e-3).all()  # the end that is forced on a long answer aside


def test_writing_goes_on_where_it_stopped(tiny, tmp_path):
    folder, dialogues = tmp_path, write(tiny, "code", 100, tmp_path, **OPTIONS)
    first, times = sorted(folder.glob("code-0-*.npz")), {}
    times = {path: path.stat().st_mtime_ns for path in first}
    again = write(tiny, "code", dialogues.num_tokens + 1, folder, **OPTIONS)
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert len(sorted(folder.glob("code-0-*.npz"))) == len(first) + 1
    for a, b in zip(dialogues.ids, again.ids, strict=False):
        assert np.array_equal(a, b)
    other = write(tiny, "code", 1, folder, **{**OPTIONS, "longest": (6, 11)})  # its own shards
    assert len(other.ids) and len(sorted(folder.glob("code-0-*.npz"))) == len(first) + 2
    first[-1].unlink()
    rewritten = write(tiny, "code", dialogues.num_tokens, folder, **OPTIONS)
    assert all(np.array_equal(a, b) for a, b in zip(dialogues.ids, rewritten.ids, strict=True))


def test_files_keep_dialogues_and_empty_ones(tmp_path):
    dialogues = Dialogues([np.array([1, 2, 3]), np.array([70_000])], [2, 1])
    dialogues.save(tmp_path / "a.npz")
    Dialogues([], []).save(tmp_path / "b.npz")
    both = Dialogues.load(tmp_path / "a.npz", tmp_path / "b.npz")
    assert [ids.tolist() for ids in both.ids] == [[1, 2, 3], [70_000]] and both.answers == [2, 1]
    assert both.num_tokens == 4 and sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_other_domains_and_too_few_steps_are_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="domain must be one of .*'mixed'.*, got 'tea'"):
        write(tiny, "tea", 10, tmp_path, progress=False)
    with pytest.raises(ValueError, match="steps that let an answer begin, got 5"):
        write(tiny, "chat", 10, tmp_path, batch=1, steps=5, progress=False)
    assert tiny.model.config._attn_implementation == "sdpa"
