"""engine/turns.py: threads that share a target and drafters, or a GPU: each gets what it would get alone."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import make_target, random_ids
from test_cuda_graphs import arms_for, on_the_device
from test_kernels import GPU

import flashspec_core as fs
from flashspec_core.engine.kv_cache import CachedModel


@pytest.fixture
def hasty():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*jobs):
    """What each job gives, one a thread."""
    out = [None] * len(jobs)

    def run(i):
        try:
            out[i] = jobs[i]()
        except Exception as error:  # noqa: BLE001 - shown beside what was expected
            out[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it waits for ever"
    return out


def test_threads_may_share_a_target_and_its_drafters(hasty):
    target = make_target(hidden=64)
    arms = arms_for(target, "model", "eagle", "medusa", "early exit", "n-gram")

    def texts(shift):
        options = dict(max_new_tokens=16, seed=3, sampling=fs.Sampling(0.9 * (shift % 2)))
        same = target if shift % 2 else fs.Target(target.model)
        shifted = arms[shift:] + arms[:shift]
        return [fs.generate(same, arm, random_ids(5 + 7 * shift), **options).token_ids for arm in shifted]

    alone = [texts(shift) for shift in range(4)]
    assert at_once(*(lambda shift=shift: texts(shift) for shift in range(4))) == alone


def test_a_stream_is_closed_while_another_thread_decodes(hasty):
    target = make_target(hidden=64)
    arms = arms_for(target, "model", "eagle")
    options = dict(max_new_tokens=40, seed=3)
    alone = [fs.generate(target, arm, random_ids(9), **options).token_ids for arm in arms]

    def closing():
        for i in range(60):
            stream = fs.stream(target, arms[i % 2], random_ids(50), **options)
            next(stream)
            stream.close()

    def decoding():
        return [[fs.generate(target, arm, random_ids(9), **options).token_ids for arm in arms] for _ in range(5)]

    assert at_once(closing, decoding) == [None, [alone] * 5]


def test_a_chat_is_closed_while_another_thread_decodes(hasty):
    target = make_target(hidden=64)
    (arm,) = arms_for(target, "model")
    alone, chat = fs.generate(target, arm, random_ids(9), max_new_tokens=40).token_ids, fs.Chat(target, arm)

    def closing():
        for _ in range(20_000):
            chat.close()

    def decoding():
        return [fs.generate(target, arm, random_ids(9), max_new_tokens=40).token_ids for _ in range(5)]

    assert at_once(closing, decoding) == [None, [alone] * 5]


def test_a_stream_is_collected_within_a_step(monkeypatch):
    # a drafter that lost its cache as a pass began failed
    target = make_target(hidden=64)
    (arm,) = arms_for(target, "model")
    alone = fs.generate(target, arm, random_ids(9), max_new_tokens=12).token_ids
    real, left = CachedModel._forward, []

    def forward(self, *arguments):
        while left and self is arm.drafter.cached:
            left.pop().close()
        return real(self, *arguments)

    monkeypatch.setattr(CachedModel, "_forward", forward)
    stream = fs.stream(target, arm, random_ids(50), max_new_tokens=12)
    next(stream)
    left.append(stream)
    assert fs.generate(target, arm, random_ids(9), max_new_tokens=12).token_ids == alone and not left


def test_own_passes_of_a_model_are_not_taken_for_a_steps(hasty):
    target = make_target(hidden=64)
    (arm,) = arms_for(target, "eagle")

    def decoding():
        out = [fs.generate(target, arm, random_ids(9), max_new_tokens=24, seed=3) for _ in range(5)]
        return [(o.token_ids, [s.num_accepted for s in o.steps]) for o in out]

    def passing():
        with torch.no_grad():
            for _ in range(200):
                target.model(torch.tensor([random_ids(7)]))

    alone = decoding()
    assert at_once(decoding, passing) == [alone, None]


def test_what_is_called_within_a_step_may_decode():
    target = make_target()

    def processor(ids, logits):
        fs.generate(target, fs.NGramDrafter(1), [1, 2, 3], max_new_tokens=2)
        return logits

    def text(arm, processor=None):
        return fs.generate(target, arm, [5, 6, 5, 6], max_new_tokens=6, logits_processor=processor).token_ids

    assert at_once(lambda: text(fs.NGramDrafter(1), processor)) == [text(fs.Arm(None))]


ENDS = """
import threading
from conftest import make_target
import flashspec_core as fs
from flashspec_core.engine.turns import turn
target = make_target()
stream = fs.stream(target, fs.Arm(None), [1, 2])
next(stream)
held = turn(target.model)
thread = threading.Thread(target=held.__enter__)  # stands for a daemon in the middle of a step
thread.start()
thread.join()
"""


def test_a_process_ends_while_a_thread_of_it_decodes():
    ended = subprocess.run([sys.executable, "-c", ENDS], cwd=Path(__file__).parent, timeout=120)
    assert ended.returncode == 0


@GPU
@pytest.mark.gpu
def test_gpu_threads_capture_while_others_decode(hasty):
    def job(capture):
        target, (arm,) = on_the_device("model")

        def texts():
            target.stations.clear()  # captured anew each time
            options = dict(max_new_tokens=24, seed=3, sampling=fs.Sampling(0.9), capture=capture)
            arms = [fs.Arm(arm.drafter, gamma) for gamma in (1, 2, 3, 4) * 3]
            return [fs.generate(target, arm, random_ids(20), **options).token_ids for arm in arms]

        return texts

    jobs = [job(True), job(True), job(False)]
    alone = [texts() for texts in jobs]
    assert at_once(*jobs) == alone
