"""Number formats of kernels against PyTorch's."""

import pytest
import torch
import triton
import triton.language as tl

from deepinfer_kernels_cuda import kernel_math as km
from deepinfer_kernels_cuda.testing.device import DEVICE


@triton.jit
def _formats(x_ptr, bf_ptr, f8_ptr, exp_ptr, pow_ptr, code_ptr, value_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(bf_ptr + i, km.as_bf16(x))
    tl.store(f8_ptr + i, km.as_e4m3(x))
    e = km.ceil_ue8m0(tl.abs(x))
    tl.store(exp_ptr + i, e.to(tl.uint8))
    tl.store(pow_ptr + i, km.ue8m0_value(e))
    code = km.e2m1_code(x)
    tl.store(code_ptr + i, code.to(tl.uint8))
    tl.store(value_ptr + i, km.e2m1_value(code))


def _inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    wide = torch.randn(1500, generator=generator) * torch.exp2(
        torch.randint(-14, 10, (1500,), generator=generator).float()
    )
    powers = torch.exp2(torch.arange(-12, 10).float())
    near = torch.cat([torch.nextafter(powers, powers * s) for s in (0.5, 2.0)])
    halves = torch.arange(-500, 501) * 0.125
    grid = torch.arange(0, 128, dtype=torch.uint8)[:127].view(torch.float8_e4m3fn).float()
    ties = (grid[1:] + grid[:-1]) / 2
    special = torch.tensor([127.9, -127.9, 447.0, 448.0, 460.0, -1e9, 1e-30, -(2.0**-10)])
    values = torch.cat([wide, powers, near, -near, halves, grid, ties, -ties, special])
    values = values[values != 0]
    return torch.nn.functional.pad(values, (0, 4096 - len(values)), value=1.0)


def test_formats_have_the_bits_of_pytorch():
    x = _inputs().to(DEVICE)
    n = len(x)
    out = {
        "bf": torch.bfloat16,
        "f8": torch.float8_e4m3fn,
        "exp": torch.uint8,
        "pow": torch.float32,
        "code": torch.uint8,
        "value": torch.float32,
    }
    made = {name: torch.empty(n, dtype=dtype, device=DEVICE) for name, dtype in out.items()}
    _formats[(1,)](x, *made.values(), N=n)
    assert torch.equal(made["bf"], x.bfloat16())
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(made["f8"].view(torch.uint8), expected.view(torch.uint8))
    # On the host: a GPU's logarithm of a power of two is not always whole.
    power = torch.exp2(x.cpu().abs().double().log2().ceil()).float()
    assert torch.equal(made["pow"].cpu(), power)
    assert torch.equal(made["pow"].cpu(), torch.exp2(made["exp"].cpu().double() - 127).float())
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=DEVICE)
    distance = (x.abs().clamp(max=6)[:, None] - grid).abs()
    best = distance.amin(1, keepdim=True)
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], device=DEVICE)
    nearest = even_first[(distance[:, even_first] == best).int().argmax(1)]
    assert torch.equal(made["code"].int() & 7, nearest.int())
    assert torch.equal(made["code"] >= 8, x < 0)
    assert torch.equal(made["value"], grid[nearest] * x.sign())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_e4m3_values_widen_exactly(dtype):
    x = torch.arange(-8, 8, device=DEVICE).to(dtype)
    assert torch.equal(x.float(), torch.arange(-8.0, 8.0, device=DEVICE))
