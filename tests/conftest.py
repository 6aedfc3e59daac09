"""Fixtures that the engine's tests share: tiny random targets of three families, drafters of known fate, SmolLM2."""

import copy
import os

if not os.path.exists("/dev/nvidiactl"):  # without a GPU kernels run in Triton's interpreter; before triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, settings

import flashspec_core as fs
from flashspec_core.records import Draft

settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=20,
    phases=set(Phase) - {Phase.explain},  # it takes longer than it helps
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

torch.set_num_threads(1)  # tiny passes gain nothing from a second one, and beside other processes wait for it for long

FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
}


def make_target(family="llama", *, vocab=101, layers=3, hidden=32, seed=0, **options):
    """A tiny random target without a tokenizer; its logits are far from flat."""
    config_class, own = FAMILIES[family]
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **{"max_position_embeddings": 512, **own, **options},
    )
    torch.manual_seed(seed)
    return fs.Target(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), name=family)


def random_ids(count, seed=0, vocab=101):
    """A list of ids, the same for the same arguments."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def plain_logits(model, ids, keep=1):
    """The last `keep` rows of a forward pass without any cache: what all caching must equal."""
    return model(input_ids=torch.tensor([ids], device=model.device)).logits[0, -keep:]


def greedy_ids(target, ids, count, **options):
    """transformers' own greedy decoding."""
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    out = target.model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=count, **options)
    return out[0, len(ids) :].tolist()


class OwnDrafter:
    """A drafter of the protocol: `propose(ids, gamma, vocab)` gives a row's drafted ids; it counts its calls."""

    name = "own"

    def __init__(self, propose):
        self.propose, self.calls = propose, {"draft": 0, "commit": 0, "reset": 0}

    def draft(self, context, gamma, sampling, noise):
        """Ask `propose`, row by row."""
        self.calls["draft"] += 1
        rows = [self.propose(ids, gamma, context.vocab_size) for ids in context.token_ids]
        width = max(map(len, rows))
        return Draft(torch.tensor([r + [-1] * (width - len(r)) for r in rows], dtype=torch.int64))

    def commit(self, context, result):
        """Count."""
        self.calls["commit"] += 1

    def reset(self):
        """Count."""
        self.calls["reset"] += 1


def scripted(truth, wrong_every=None):
    """A drafter that knows the text (prompt and all): every draft stands, or fails at each `wrong_every`-th place."""

    def propose(ids, gamma, vocab):
        drafted = truth[len(ids) : len(ids) + gamma]
        if wrong_every:
            drafted = [(t + 1) % vocab if (len(ids) + i) % wrong_every == 0 else t for i, t in enumerate(drafted)]
        return drafted

    return OwnDrafter(propose)


@pytest.fixture(scope="session")
def tiny():
    """family -> its tiny target."""
    return {family: make_target(family) for family in FAMILIES}


@pytest.fixture(scope="session")
def tiny_draft():
    """family -> a smaller model of the same vocabulary."""
    return {family: make_target(family, layers=2, hidden=16, seed=1) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request):
    """Each family's name in turn."""
    return request.param


@pytest.fixture
def llama(tiny):
    """The tiny Llama; settings of its generation_config are put back afterwards."""
    target = tiny["llama"]
    kept = copy.deepcopy(target.model.generation_config)
    yield target
    target.model.generation_config = kept


@pytest.fixture(scope="session")
def smollm2():
    """The real SmolLM2-135M-Instruct, float32, from the cache (the first run downloads it)."""
    return fs.load_target(dtype="float32", device="cpu", progress=False)
