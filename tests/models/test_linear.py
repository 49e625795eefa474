"""Packed linear maps give what plain ones do, and are given up where they do not."""

import pytest
import torch
from torch.nn import functional

from noria.backends.torch.linear import LinearKernel, chosen_kernel

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 16, 65, 300])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (97, 48), (160, 96), (1000, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_map_gives_what_a_plain_one_does(
    num_rows: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    kernel = chosen_kernel(torch.float32, CPU)
    torch.manual_seed(0)
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    wide = torch.randn(num_rows, 2 * in_features)
    for x in (wide[:, :in_features].contiguous(), wide[:, :in_features]):
        with torch.inference_mode():
            found = kernel.linear(weight, bias).apply(x)
        torch.testing.assert_close(found, functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
        assert found.shape == (num_rows, out_features)


def test_float32_is_packed_where_torch_has_onednn() -> None:
    kernel = chosen_kernel(torch.float32, CPU)
    assert kernel.packs == torch.backends.mkldnn.is_available(), kernel.reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_what_onednn_does_not_pack_is_plain(dtype: torch.dtype) -> None:
    kernel = chosen_kernel(dtype, CPU)
    assert not kernel.packs
    assert kernel.reason.startswith("torch's linear: oneDNN packs no float")


def test_a_packing_that_fails_or_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr("noria.backends.torch.linear._packed", absent)
    assert chosen_kernel(torch.float32, CPU) == LinearKernel(
        False, "torch's linear: packing for oneDNN failed (no such operator)"
    )
    monkeypatch.setattr(
        "noria.backends.torch.linear._packed",
        lambda weight: torch.ops.mkldnn._reorder_linear_weight(2 * weight, None),
    )
    assert chosen_kernel(torch.float32, CPU).reason.endswith("(a trial product was wrong)")
