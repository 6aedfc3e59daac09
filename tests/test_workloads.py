"""lab/workloads.py: prompts that a model can be asked, none twice."""

from flashspec_core.lab import workloads


def test_prompts_are_many_and_none_comes_twice():
    texts = [text for prompts in workloads.PROMPTS.values() for text in prompts]
    assert set(workloads.PROMPTS) == {"chat", "code", "copy-edit"}
    assert len(texts) == len(set(texts)) >= 8
    assert all(len(text) > 20 for text in texts)


def test_first_prompts_are_chat_messages():
    for domain, messages in workloads.first_prompts().items():
        assert messages == [{"role": "user", "content": workloads.PROMPTS[domain][0]}]
