"""engine/kv_cache.py over transformers' families of models: ragged rows and taken-back tokens equal plain passes."""

import pytest
import torch
import transformers
from conftest import plain_logits, random_ids

from flashspec_core.engine.kv_cache import CachedModel

SIZES = dict(vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256)
SIZES |= dict(intermediate_size=48, num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
OTHERS = {  # what sizes are called elsewhere; None: not asked for
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "gptj": dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, rotary_dim=4),
    "codegen": dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, rotary_dim=4),
    "falcon": dict(new_decoder_architecture=False, alibi=False, head_dim=None),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "xglm": dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48),
}
FAMILIES = """apertus arcee bitnet codegen cohere cohere2 ernie4_5 exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt2
gpt_neox gpt_oss gptj granite helium llama ministral mistral mixtral nemotron olmo olmo2 olmo3 olmoe opt phi phi3 qwen2
qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 xglm""".split()


@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_rows_and_taken_back_tokens_equal_plain_passes(name):
    kind = transformers.CONFIG_MAPPING[name]
    known = set(dir(kind)) | set(kind.__init__.__code__.co_varnames) | set(vars(kind()))
    sizes = {key: value for key, value in SIZES.items() if key in known} | OTHERS.get(name, {})
    config = kind(**{key: value for key, value in sizes.items() if value is not None})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    cached, ids = CachedModel(model), random_ids(60)
    histories = [[ids[:14], ids[5:7], ids[20:27]], [ids[:12] + ids[40:43], ids[5:9], ids[20:28]]]
    for rows in (*histories, [ids[:13], ids[5:9] + ids[50:53], ids[20:24]]):
        logits = cached.logits(rows, 2)
        for row, got in zip(rows, logits, strict=True):
            wanted = plain_logits(model, row, 2)
            assert float((got - wanted).abs().max()) < 1e-3 * float(wanted.abs().max()), len(row)
