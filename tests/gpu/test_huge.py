"""Outputs of more than 2^31 elements: the rows around that element and the last ones are right."""

from __future__ import annotations

import pytest
import torch

from coda_agent import generated

pytestmark = pytest.mark.gpu

M, N, K = 33_024, 65_536, 64


@pytest.mark.parametrize("name", ["gemm_swiglu", "gemm_partial_cross_entropy"])
def test_rows_beyond_32_bits_of_elements(name: str) -> None:
    g = torch.Generator("cuda").manual_seed(7)
    a = torch.randn(M, K, generator=g, device="cuda").bfloat16()
    b = torch.randn(N, K, generator=g, device="cuda").bfloat16()
    y = torch.randint(N, (M,), generator=g, device="cuda")
    given = (a, b, y) if name == "gemm_partial_cross_entropy" else (a, b)
    d, second, *more = getattr(generated, name)(*given)
    assert d.numel() > 1 << 31
    for start in ((1 << 31) // N - 64, M - 128):
        rows = slice(start, start + 128)
        exact = a[rows].double() @ b.double().T
        torch.testing.assert_close(d[rows].double(), exact, rtol=2**-8, atol=1e-2)
        if name == "gemm_swiglu":
            expected = torch.nn.functional.silu(exact[:, ::2]) * exact[:, 1::2]
            torch.testing.assert_close(second[rows].double(), expected, rtol=2**-7, atol=1e-2)
        else:
            target = exact.gather(1, y[rows, None])[:, 0]
            torch.testing.assert_close(second[rows].double(), target, rtol=2**-8, atol=1e-2)
            torch.testing.assert_close(
                more[0][rows].double(), exact.logsumexp(1), rtol=1e-5, atol=1e-4
            )
