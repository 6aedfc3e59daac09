"""engine/chat.py: a turn reads only what is new, and says what a fresh start would."""

import pytest

import flashspec_core as fs


@pytest.mark.parametrize("drafter", ["n-gram", "off"])
def test_the_second_turn_reads_only_what_is_new(smollm2, drafter):
    arm = fs.Arm(fs.NGramDrafter(), 5) if drafter == "n-gram" else fs.Arm(None)
    chat = fs.Chat(smollm2, arm, max_new_tokens=12, stop="\n")
    first = chat.say("Name a colour.")
    second = chat.say("Another one?")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert first.steps[0].num_prefilled == len(first.prompt_token_ids) - 1
    shared = len(first.prompt_token_ids)
    new = len(second.prompt_token_ids) - shared
    assert second.steps[0].num_prefilled <= new, (second.steps[0].num_prefilled, new)
    assert second.prompt_token_ids[:shared] == first.prompt_token_ids
    fresh = fs.generate(smollm2, arm, chat.messages[:3], max_new_tokens=12, stop="\n")
    assert fresh.token_ids == second.token_ids and fresh.steps[0].num_prefilled > second.steps[0].num_prefilled
    chat.close()
    assert chat._cached.ids == []


def test_an_edited_history_is_read_again_and_a_failed_turn_is_not_kept(smollm2):
    chat = fs.Chat(smollm2, fs.Arm(None), max_new_tokens=6)
    chat.say("Say one.")
    chat.messages[0]["content"] = "Count to three."
    with pytest.raises(ValueError, match="max_new_tokens"):
        chat.say("And then?", max_new_tokens=0)
    assert len(chat.messages) == 2
    out = chat.say("And then?")
    fresh = fs.generate(smollm2, fs.Arm(None), chat.messages[:3], max_new_tokens=6)
    assert out.token_ids == fresh.token_ids


def test_a_drafter_of_the_same_conversation_keeps_its_cache(smollm2):
    drafter = fs.EarlyExitDrafter(smollm2, 2)
    chat = fs.Chat(smollm2, fs.Arm(drafter, 2), max_new_tokens=6)
    chat.say("Name a colour.")
    read = drafter.cached.num_read
    second = chat.say("Another one?")
    assert drafter.cached.num_read - read < len(second.prompt_token_ids)
    chat.close()
    assert drafter.cached.ids == []
