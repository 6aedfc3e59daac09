"""Threads that share a target and drafters, or a GPU: each gets what it would get alone."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import make_target, random_ids
from test_cuda_graphs import arms_for, on_the_device
from test_kernels import GPU

import flashspec_core as fs


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

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def test_threads_may_share_a_target_and_its_drafters(hasty):
    target = make_target(hidden=64)
    arms = arms_for(target, "model", "eagle", "medusa", "early exit", "n-gram")

    def texts(shift):
        options = dict(max_new_tokens=16, seed=3, sampling=fs.Sampling(0.9 * (shift % 2)))
        turn = arms[shift:] + arms[:shift]
        return [fs.generate(target, arm, random_ids(5 + 7 * shift), **options).token_ids for arm in turn]

    alone = [texts(shift) for shift in range(4)]
    assert at_once(*(lambda shift=shift: texts(shift) for shift in range(4))) == alone


def test_a_stream_is_closed_while_another_thread_decodes(hasty):
    target = make_target(hidden=64)
    arms = arms_for(target, "model", "eagle")
    options = dict(max_new_tokens=40, seed=3)
    alone = fs.generate(target, arms, random_ids(9), policy=fs.FixedArm(1), **options).token_ids

    def closing():
        for _ in range(30):
            stream = fs.stream(target, arms, random_ids(50), policy=fs.FixedArm(1), **options)
            next(stream)
            stream.close()

    def decoding():
        return [fs.generate(target, arms, random_ids(9), policy=fs.FixedArm(1), **options).token_ids for _ in range(5)]

    assert at_once(closing, decoding) == [None, [alone] * 5]


def test_what_is_called_within_a_step_may_decode():
    target = make_target()

    def processor(ids, logits):
        fs.generate(target, fs.NGramDrafter(1), [1, 2, 3], max_new_tokens=2)
        return logits

    with_it = fs.generate(target, fs.NGramDrafter(1), [5, 6, 5, 6], max_new_tokens=6, logits_processor=processor)
    assert with_it.token_ids == fs.generate(target, fs.Arm(None), [5, 6, 5, 6], max_new_tokens=6).token_ids


ENDS = """
import threading
from conftest import make_target
import flashspec_core as fs
from flashspec_core.engine import decode
target = make_target()
stream = fs.stream(target, fs.Arm(None), [1, 2])
next(stream)
thread = threading.Thread(target=decode._LOCKS[target.model].acquire)  # stands for a daemon in the middle of a step
thread.start()
thread.join()
"""


def test_a_process_ends_while_a_thread_of_it_decodes():
    subprocess.run([sys.executable, "-c", ENDS], cwd=Path(__file__).parent, check=True, timeout=120)


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
