"""Narrow products equal PyTorch's linear, and lend the modules only for the time of a pass."""

import pytest
import torch
from torch.nn import Linear

from flashspec_core.engine.cpu import MAX_ROWS, narrow_products, plain_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", range(1, 10))
def test_narrow_products_equal_linear(rows, bias):
    torch.manual_seed(rows)
    layer = Linear(48, 33, bias=bias)
    flat, wide = torch.randn(rows, 48), torch.randn(1, 48, rows).transpose(1, 2)  # the second is not contiguous
    wanted = [layer(flat), layer(wide)]
    with narrow_products([layer]):
        got = [layer(flat), layer(wide)]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
        assert a.is_contiguous()


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (2, 4), (3, 3), (2, 1, 2), (0,), ()])
def test_leading_dimensions_stay(shape):
    layer, x = Linear(16, 5), torch.randn(*shape, 16)
    with narrow_products([layer]):
        got = layer(x)
    torch.testing.assert_close(got, layer(x))
    assert got.shape == (*shape, 5)


def test_the_narrow_order_is_taken_from_two_rows_to_eight(monkeypatch):
    layer, seen = Linear(4, 4), []
    plain = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args: (seen.append(args[1].shape[1]), plain(*args))[1])
    with narrow_products([layer]):
        for rows in range(1, 12):
            layer(torch.randn(rows, 4))
    assert seen == list(range(2, MAX_ROWS + 1)) and MAX_ROWS == 8


def test_classes_come_back_also_after_an_exception():
    layers = torch.nn.Sequential(Linear(4, 4), torch.nn.ReLU(), Linear(4, 4))
    linears = plain_linears(layers)
    assert linears == [layers[0], layers[2]]
    with narrow_products(linears):
        assert all(type(m) is not Linear and isinstance(m, Linear) for m in linears)
        assert type(layers[1]) is torch.nn.ReLU
        assert plain_linears(layers) == linears  # a call that begins in another thread asks now
    assert all(type(m) is Linear for m in linears)
    with pytest.raises(RuntimeError), narrow_products(linears):
        layers(torch.randn(3, 5))
    assert all(type(m) is Linear for m in linears)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_other_dtypes_are_left_alone(dtype):
    layers = torch.nn.Sequential(Linear(4, 4, dtype=dtype), Linear(4, 4))
    assert plain_linears(layers) == [layers[1]]


def test_subclasses_are_left_alone():
    class Quantised(Linear):
        def forward(self, x):
            return super().forward(x) + 1

    layers = torch.nn.Sequential(Quantised(4, 4), torch.nn.LazyLinear(4), Linear(4, 4, device="meta"))
    assert plain_linears(layers) == []


@pytest.mark.parametrize("pays", [True, False])
def test_a_model_passes_through_it_where_it_pays_and_is_left_as_it_was(llama, monkeypatch, pays):
    from flashspec_core.engine import kv_cache

    monkeypatch.setattr(kv_cache, "narrow_pays", lambda: pays)
    cached = kv_cache.CachedModel(llama.model)
    cached.logits([[1, 2, 3, 4]], 3)
    linears = plain_linears(llama.model)
    assert len(linears) == 3 * 7 + 1 and cached.linears == (linears if pays else [])
