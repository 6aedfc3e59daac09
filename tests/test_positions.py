"""lab/positions.py: the log says what decoding does, and no policy beats the best path."""

import pytest

import flashspec_core as fs
from flashspec_core.lab import positions, workloads

PROMPTS = {"code": workloads.PROMPTS["code"][:1], "copy-edit": workloads.PROMPTS["copy-edit"][:1]}
ARMS = [(None, 0), ("n-gram", 8), ("eagle-chat", 3), ("eagle-code", 6), ("medusa-mixed", 4)]


def price(arm, drafted):
    return 1.0 + 0.05 * drafted * (arm[0] != "n-gram")


@pytest.fixture(scope="module")
def heads(smollm2):
    return {name: fs.load_drafter(name, smollm2) for name in positions.HEADS}


@pytest.fixture(scope="module")
def answers(smollm2, heads, tmp_path_factory):
    lines, path = [], tmp_path_factory.mktemp("log") / "log.csv.gz"
    positions.write(positions.score(smollm2, PROMPTS, heads, 20, report=lines.append), path)
    assert lines == ["code: 1 answers", "copy-edit: 1 answers"]
    return positions.read(path)


@pytest.mark.parametrize("arm", ARMS[1:], ids=lambda arm: arm[0])
@pytest.mark.parametrize("domain", PROMPTS)
def test_the_log_says_what_decoding_does(smollm2, heads, answers, domain, arm):
    drafter = heads.get(arm[0]) or fs.NGramDrafter()
    prompt = workloads.chat_messages(PROMPTS[domain][0])
    out = fs.generate(smollm2, fs.Arm(drafter, arm[1]), prompt, max_new_tokens=20)
    rows, at, told = answers[domain, 0], 0, []
    assert [row["position"] for row in rows] == list(range(20))
    while at < len(rows):
        emitted, drafted = positions.step(rows[at], arm, len(rows) - at)
        told.append((drafted, emitted - 1))
        at += emitted
    assert told == [(s.num_draft_tokens, s.num_accepted) for s in out.steps]


def test_a_head_drafts_no_further_than_its_depth_and_none_at_an_answers_start(answers):
    row = answers["code", 0][1] | {"medusa-mixed": 4, "eagle-code": 8}
    assert positions.step(row, ("medusa-mixed", 8), 20) == (5, 4) and positions.step(row, ("eagle-code", 8), 20) == (
        9,
        8,
    )
    assert positions.step(row, ("eagle-code", 8), 3) == (3, 2)  # an answer's end leaves room for two and the last one
    assert positions.step(row | {"position": 0}, ("eagle-code", 8), 20) == (1, 0)
    with pytest.raises(ValueError, match="expected gamma up to 8, .* got 9"):
        positions.step(row, ("n-gram", 9), 20)


def test_no_choice_beats_the_best_path(answers):
    for rows in answers.values():
        seconds, path = positions.best_path(rows, ARMS, price)
        again = positions.play([rows], ARMS, price, fs.Replay(path))
        assert again.seconds == [pytest.approx(seconds)] and again.arms == [path] and again.tokens == [20]
        for i in range(len(ARMS)):
            fixed = positions.play([rows], ARMS, price, fs.FixedArm(i))
            assert fixed.seconds[0] >= seconds - 1e-9 and fixed.tokens_per_second <= 20 / seconds + 1e-9


def test_a_policy_learns_tokens_per_second_behind_the_first_step(answers):
    class Counts(fs.FixedArm):
        def update(self, arm, reward, feedback=None):
            assert feedback.num_rejected == (feedback.num_accepted < feedback.num_draft_tokens)
            told.append((arm, reward, feedback.context, feedback.num_accepted))

    told = []
    played = positions.play([answers["copy-edit", 0]], ARMS, price, Counts(1), lambda row: row["repeats"])
    assert len(told) == len(played.arms[0]) - 1 and max(reward for _, reward, _, _ in told) == 1
    assert {context for _, _, context, _ in told} == {0, 1} and all(arm == 1 for arm, _, _, _ in told)


def test_a_streams_answers_come_in_its_order(answers):
    prompts = [("copy-edit", PROMPTS["copy-edit"][0]), ("code", PROMPTS["code"][0])]
    assert positions.stream(answers, prompts) == [answers["copy-edit", 0], answers["code", 0]]
