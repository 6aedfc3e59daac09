"""The door: what it refuses and how it says so, rows without a law, and that a call can be repeated."""

import importlib
import math
import sys

import numpy as np
import pytest
import torch

import flashspec_core as fs
from flashspec_core.noise import log_uniforms
from flashspec_core.records import VerifyResult
from flashspec_core.verify import METHODS, check_normalised, decide
from flashspec_core.verify.logits import warp

NAN, INF = math.nan, math.inf
SOFT = fs.Sampling(temperature=1.0)
BATCH, GAMMA, VOCAB, TRIMMED = 2, 3, 7, 4


def arguments(**changes):
    """A call that is right, batch 2, gamma 3, vocabulary 7, drafts over ids (0, 2, 3, 6); then what is changed."""
    generator = torch.Generator().manual_seed(0)
    return {
        "target_logits": torch.randn(BATCH, GAMMA + 1, VOCAB, generator=generator),
        "draft_token_ids": torch.tensor([[0, 2, 6], [3, 3, -1]]),
        "draft_logits": torch.randn(BATCH, GAMMA, TRIMMED, generator=generator),
        "draft_logsumexp": None,
        "draft_vocab_ids": torch.tensor([0, 2, 3, 6]),
        "sampling": SOFT,
        "log_uniforms": log_uniforms(torch.arange(BATCH), GAMMA),
        "seeds": torch.arange(BATCH),
    } | changes


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ids(*rows):
    return torch.tensor(rows)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_logsumexp": torch.randn(2, 3)},
        {"draft_logits": None, "draft_vocab_ids": None},
        {"draft_vocab_ids": None, "draft_token_ids": ids([0, 1, 3], [3, -1, -1])},
        {"draft_vocab_ids": None, "draft_logits": zeros(2, 3, 7, dtype=torch.float16)},
        {"target_logits": zeros(2, 4, 7, dtype=torch.bfloat16), "sampling": [SOFT, fs.Sampling()]},
        {"method": "token", "impl": "reference", "positions": ids(5, 6)},
        {"draft_token_ids": ids([-1, -1, -1], [-1, -1, -1])},
        {"seeds": torch.tensor([-(2**63), 2**63 - 1])},
    ],
)
def test_right_calls_pass_and_have_the_promised_shapes(changes):
    result = fs.verify(**arguments(**changes))
    assert isinstance(result, VerifyResult)
    assert result.num_accepted.shape == result.next_token_ids.shape == result.invalid.shape == (2,)
    assert result.token_ids.shape == (2, 4) and result.target_logprobs.shape == result.draft_logprobs.shape == (2, 3)
    for whole in (result.num_accepted, result.next_token_ids, result.token_ids, result.invalid):
        assert whole.dtype == torch.int64
    assert result.target_logprobs.dtype == result.draft_logprobs.dtype == torch.float32
    assert result.invalid.tolist() == [-1, -1]
    shown = (result.token_ids != fs.PLACEHOLDER_TOKEN_ID).sum(1)
    assert torch.equal(shown, result.num_accepted + 1)
    assert torch.equal(result.token_ids.gather(1, result.num_accepted[:, None])[:, 0], result.next_token_ids)


@pytest.mark.parametrize(
    "changes, expected, got",
    [
        ({"target_logits": zeros(4, 7)}, "target_logits as [batch, gamma + 1, vocab]", "[4, 7]"),
        ({"target_logits": zeros(2, 4, 0)}, "none of them 0", "[2, 4, 0]"),
        ({"target_logits": zeros(0, 4, 7)}, "none of them 0", "[0, 4, 7]"),
        ({"target_logits": zeros(2, 0, 7)}, "none of them 0", "[2, 0, 7]"),
        ({"target_logits": [[[0.0]]]}, "target_logits as [batch, gamma + 1, vocab]", "list"),
        ({"target_logits": zeros(2, 4, 7, dtype=torch.float64)}, "float32 or float16 or bfloat16", "torch.float64"),
        ({"target_logits": zeros(2, 4, 7, dtype=torch.int64)}, "float32 or float16 or bfloat16", "torch.int64"),
        ({"draft_token_ids": ids([0, 2], [3, 3])}, "draft_token_ids as [2, 3] int64", "[2, 2] torch.int64"),
        ({"draft_token_ids": ids([0, 2, 6])}, "draft_token_ids as [2, 3] int64", "[1, 3] torch.int64"),
        ({"draft_token_ids": ids([0, 2, 6], [3, 3, -1]).int()}, "draft_token_ids as [2, 3] int64", "torch.int32"),
        ({"draft_token_ids": [[0, 2, 6], [3, 3, -1]]}, "draft_token_ids as [2, 3] int64", "list"),
        ({"draft_token_ids": ids([0, 2, 7], [3, 3, -1])}, "draft_token_ids in -1..6", "-1..7"),
        ({"draft_token_ids": ids([0, 2, 6], [3, 3, -2])}, "draft_token_ids in -1..6", "-2..6"),
        ({"draft_token_ids": ids([0, -1, 6], [3, 3, -1])}, "-1 in draft_token_ids only at the end", "ids behind a -1"),
        ({"draft_token_ids": ids([0, 2, 6], [-1, 3, 3])}, "-1 in draft_token_ids only at the end", "ids behind a -1"),
        ({"log_uniforms": zeros(2, 4)}, "log_uniforms as [2, 3] float32", "[2, 4] torch.float32"),
        ({"log_uniforms": zeros(2, 3, dtype=torch.float64)}, "log_uniforms as [2, 3] float32", "torch.float64"),
        ({"log_uniforms": None}, "log_uniforms as [2, 3] float32", "NoneType"),
        ({"seeds": ids([0], [1])}, "seeds as [2] int64", "[2, 1] torch.int64"),
        ({"seeds": zeros(2)}, "seeds as [2] int64", "torch.float32"),
        ({"seeds": 7}, "seeds as [2] int64", "int"),
        ({"draft_logits": zeros(2, 4, 4)}, "draft_logits as [2, 3, 4]", "[2, 4, 4] torch.float32"),
        ({"draft_logits": zeros(1, 3, 4)}, "draft_logits as [2, 3, 4]", "[1, 3, 4] torch.float32"),
        ({"draft_logits": zeros(2, 3, 4, dtype=torch.float64)}, "float32 or float16 or bfloat16", "torch.float64"),
        ({"draft_logits": [[[0.0]]]}, "draft_logits as [2, 3, ", "list"),
        ({"draft_logsumexp": zeros(2)}, "draft_logsumexp as [2, 3] float32", "[2] torch.float32"),
        ({"draft_logsumexp": zeros(2, 3).half()}, "draft_logsumexp as [2, 3] float32", "torch.float16"),
        ({"draft_vocab_ids": ids(0, 2, 3)}, "draft_vocab_ids as [4] int64", "[3] torch.int64"),
        ({"draft_vocab_ids": ids(0, 2, 3, 6).int()}, "draft_vocab_ids as [4] int64", "torch.int32"),
        ({"draft_vocab_ids": ids(0, 3, 2, 6)}, "draft_vocab_ids sorted, unique, in 0..6", "[0, 3, 2, 6]"),
        ({"draft_vocab_ids": ids(0, 2, 2, 6)}, "draft_vocab_ids sorted, unique, in 0..6", "[0, 2, 2, 6]"),
        ({"draft_vocab_ids": ids(0, 2, 3, 7)}, "draft_vocab_ids sorted, unique, in 0..6", "[0, 2, 3, 7]"),
        ({"draft_vocab_ids": ids(-1, 2, 3, 6)}, "draft_vocab_ids sorted, unique, in 0..6", "[-1, 2, 3, 6]"),
        # BUGS 22: a draft vocabulary larger than the target's is masked and cut by its drafter, before its softmax
        ({"draft_logits": zeros(2, 3, 9), "draft_vocab_ids": None}, "draft_vocab <= 7 (mask and cut", "9"),
    ],
)
def test_wrong_shapes_types_and_ids_are_refused(changes, expected, got):
    with pytest.raises(ValueError) as error:
        fs.verify(**arguments(**changes))
    wanted, _, came = str(error.value).partition(", got ")
    assert wanted.startswith("expected ") and expected in wanted and got in came


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"method": "blok"}, r"method must be one of \(.*'token'.*\), got 'blok'"),
        ({"impl": "cuda"}, r"impl must be one of \(.*'reference'.*\) or None, got 'cuda'"),
        ({"sampling": [SOFT]}, r"one fs\.Sampling or one a row \(2\), got"),
        ({"sampling": [SOFT, 0.7]}, r"one fs\.Sampling or one a row \(2\), got"),
    ],
)
def test_wrong_names_and_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        fs.verify(**arguments(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_logits": None, "draft_vocab_ids": ids(0, 99)},
        {"draft_logits": None, "draft_vocab_ids": None, "draft_logsumexp": zeros(9)},
        {"draft_logits": zeros(2, 3, 0), "draft_vocab_ids": None},
        pytest.param(
            {"draft_logits": zeros(2, 3, 0), "draft_vocab_ids": torch.empty(0, dtype=torch.int64)}, id="empty"
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(changes):
    with pytest.raises(ValueError, match="expected draft_"):
        fs.verify(**arguments(**changes))


def test_an_array_that_is_no_tensor_is_named():
    with pytest.raises(ValueError, match="got .*ndarray"):
        fs.verify(**arguments(target_logits=np.zeros((2, 4, 7), dtype=np.float32)))


@pytest.mark.parametrize("name", ["sampling", "log_uniforms", "seeds"])
def test_noise_and_law_have_no_default(name):
    given = arguments()
    del given[name]
    with pytest.raises(TypeError, match=name):
        fs.verify(**given)


LAWLESS = {
    "nan": [NAN] * 7,
    "one nan": [0, 1, NAN, 2, 0, 0, 0],
    "none finite": [-INF] * 7,
    "mixed": [NAN, -INF] * 3 + [NAN],
}
FILTERED = fs.Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.01)
ALL_LAWS = [SOFT, FILTERED, fs.Sampling(), [SOFT, fs.Sampling()]]


@pytest.mark.parametrize("sampling", ALL_LAWS, ids=["soft", "filtered", "greedy", "soft beside greedy"])
@pytest.mark.parametrize("law", LAWLESS.values(), ids=LAWLESS)
@pytest.mark.parametrize("position", [0, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_row_without_a_law_is_an_error_that_names_it(law, position, sampling, method):
    # BUGS 10
    call = arguments(sampling=sampling, method=method, positions=ids(0, 0))
    call["target_logits"][0, position] = torch.tensor(law)
    with pytest.raises(
        ValueError, match=rf"at least one finite number and no NaN.* row 0, position {position} does not"
    ):
        fs.verify(**call)
    # where raising would make the host wait, a flag is read with the tokens and the ids stay in the vocabulary
    parts = ("draft_token_ids", "draft_logits", "draft_logsumexp", "draft_vocab_ids")
    draft, rows = fs.Draft(*map(call.get, parts)), [sampling] * 2 if isinstance(sampling, fs.Sampling) else sampling
    result = decide(call["target_logits"], draft, rows, call["log_uniforms"], call["seeds"], ids(0, 0), method)
    assert result.invalid.tolist() == [position, -1]
    assert -1 <= int(result.token_ids.min()) and int(result.token_ids.max()) < VOCAB
    assert 0 <= int(result.next_token_ids.min())


@pytest.mark.parametrize("law", LAWLESS.values(), ids=LAWLESS)
def test_a_greedy_row_without_a_law_beside_a_soft_row_is_an_error(law):
    # BUGS 10
    call = arguments(sampling=[fs.Sampling(), SOFT])
    call["target_logits"][0, 1] = torch.tensor(law)
    with pytest.raises(ValueError, match="row 0, position 1 does not"):
        fs.verify(**call)


@pytest.mark.parametrize("law", [[torch.finfo(torch.float32).min] * 7, [3e38] + [0.0] * 6], ids=["masked", "large"])
def test_a_row_that_loses_its_law_to_the_temperature_is_an_error(law):
    # BUGS 10
    call = arguments(sampling=fs.Sampling(temperature=0.5))
    call["target_logits"][0, 1] = torch.tensor(law)
    with pytest.raises(ValueError, match="row 0, position 1 does not"):
        fs.verify(**call)


def test_the_first_lawless_row_and_position_are_named():
    call = arguments()
    call["target_logits"][1, 2] = call["target_logits"][1, 1] = NAN
    with pytest.raises(ValueError, match="row 1, position 1 does not"):
        fs.verify(**call)
    call["target_logits"][0, 0] = NAN
    with pytest.raises(ValueError, match="row 0, position 0 does not"):
        fs.verify(**call)


@pytest.mark.parametrize("sampling", [*ALL_LAWS, [fs.Sampling(), SOFT]])
def test_what_lies_behind_a_rows_own_end_is_not_read(sampling):
    # BUGS 19: row 1 has two drafts, so target rows 0..2 and draft rows 0..1
    call = arguments(sampling=sampling, draft_logsumexp=zeros(2, 3) + 1.5)
    clean = fs.verify(**call)
    call["target_logits"][1, 3] = call["draft_logits"][1, 2] = NAN
    call["draft_logsumexp"][1, 2] = NAN
    dirty = fs.verify(**call)
    assert torch.equal(clean.token_ids, dirty.token_ids) and dirty.invalid.tolist() == [-1, -1]
    call["target_logits"][1, 2] = NAN  # its bonus row is read
    with pytest.raises(ValueError, match="row 1, position 2"):
        fs.verify(**call | {"sampling": SOFT})


@pytest.mark.parametrize("kept", [False, True])
def test_draft_logsumexp_changes_nothing(kept):
    call = arguments(sampling=fs.Sampling(temperature=0.7))
    scaled = call["draft_logits"] / 0.7
    result = fs.verify(**call | {"draft_logsumexp": scaled.logsumexp(-1) if kept else None})
    q = scaled.log_softmax(-1)
    assert result.draft_logprobs[0].tolist() == pytest.approx([float(q[0, i, v]) for i, v in enumerate((0, 1, 3))])


def test_a_draft_law_that_does_not_sum_to_one_is_refused_by_row_and_position():
    # "q in the ratio is not the q that was sampled from": a log-sum-exp kept from before the temperature, or a filter
    logits = arguments()["draft_logits"]
    rows = [fs.Sampling(temperature=0.5), fs.Sampling(temperature=1.0, top_k=2)]
    kept = warp(logits, rows).logsumexp(-1)
    drafted = ids([0, 1, 3], [2, 2, -1])
    kept[1, 2] = NAN  # padding is not read
    check_normalised(fs.Draft(drafted, logits, kept), rows)
    check_normalised(fs.Draft(drafted, logits), rows)
    for row, position in ((0, 2), (1, 1)):
        for value in (logits[row, position].logsumexp(-1), NAN, INF):
            wrong = kept.clone()
            wrong[row, position] = value
            with pytest.raises(ValueError, match=f"sums to 1, got .* in row {row} at position {position}"):
                check_normalised(fs.Draft(drafted, logits, wrong), rows)


def test_an_empty_draft_is_normalised():
    empty = fs.Draft(ids([], []).long(), zeros(2, 0, 4), zeros(2, 0))
    assert check_normalised(empty, [SOFT] * 2) is None


def test_a_smaller_target_vocabulary_works_once_the_draft_is_cut():
    # BUGS 22: target V 10, draft V 12: ids 10 and 11 masked before the draft's softmax, q renormalised; and the reverse
    wide = torch.tensor([0.0] * 10 + [5.0, 5.0]).expand(2, 1, 12)
    call = {"draft_token_ids": ids([4], [9]), "log_uniforms": zeros(2, 1), "seeds": ids(0, 1), "sampling": SOFT}
    result = fs.verify(torch.zeros(2, 2, 10), draft_logits=wide[..., :10], **call)
    assert result.draft_logprobs.exp()[:, 0].tolist() == pytest.approx([0.1, 0.1])
    assert result.num_accepted.tolist() == [1, 1] and int(result.token_ids.max()) < 10
    reverse = fs.verify(torch.zeros(2, 2, 12), draft_logits=wide[..., :10], **call)
    assert reverse.target_logprobs.exp()[:, 0].tolist() == pytest.approx([1 / 12, 1 / 12])
    assert reverse.num_accepted.tolist() == [0, 0] and set(reverse.next_token_ids.tolist()) <= {10, 11}


def test_a_call_repeats_and_leaves_its_arguments_alone():
    call, before = arguments(sampling=[FILTERED, fs.Sampling()]), arguments()
    first, second = fs.verify(**call), fs.verify(**call)
    assert torch.equal(first.token_ids, second.token_ids)
    for name, value in before.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(call[name], value), name


def test_the_door_stays_the_function():
    room = importlib.import_module("flashspec_core.verify")
    assert room is sys.modules["flashspec_core.verify"] and fs.verify is room.verify
    fs.verify = room  # what the import system does after importing the room
    assert fs.verify is room.verify and callable(fs.verify)
