"""Rotary position embedding (RoPE) of queries and keys, values passed through.

O[m, 2j]     = X[m, 2j] cos θ + X[m, 2j + 1] sin θ
O[m, 2j + 1] = X[m, 2j + 1] cos θ - X[m, 2j] sin θ,   θ = p[m] · f[j],   X = A Bᵀ

A (M, K) and B (N, K) bfloat16, N even; p (M,) float32 positions; O (M, N) bfloat16. `rope` takes
the frequencies f as t (N,) float32: f[j] / 2π = t[2j] + t[2j + 1], 0 where a pair is not rotated.
`rope_by_table` takes cs (M, N) bfloat16 with cos θ in the even and sin θ in the odd columns.
"""

from coda_agent.primitives import (
    ColVector,
    RowVector,
    Tile,
    epilogue,
    interleave,
    pairs,
    rotary,
    rotate,
)


@epilogue(O=Tile)
def rope(acc, p: ColVector, t: RowVector):
    """O = the pairs of columns of A Bᵀ, each rotated by position · frequency."""
    return {"O": rotary(acc, p, t)}


@epilogue(R=Tile)
def rope_by_table(acc, cs: Tile):
    """R = the same by a table of cosines and sines."""
    x, y = pairs(acc)
    cos, sin = pairs(cs)
    u, v = rotate(x, y, cos, sin)
    return {"R": interleave(u, v)}


# --- end of program ---

WHY = """
- `rotary` needs M + N numbers where a table has M·N, and computes a sine and a cosine a pair.
- Its angles keep their digits at any position: frequencies are in turns, as the sum of two floats,
  and whole turns come off before anything is rounded. A float32 angle of 10⁵ radians is off by up
  to 4·10⁻³.
- Heads repeat, values and the tails of partly rotated heads stay: all of that is in t, made once by
  `rotary_turns` of `coda_agent.primitives.rotary`, and none of it in the kernel.
- Any table will do for `rope_by_table`, in any order of rows; it costs its bytes. One that repeats
  over heads or sequences is smaller: see rope_by_head.
- Rows of a batch need no case of their own: p[m] is the position in m's own sequence.
"""


def reference(A, B, p, t, cs):
    import torch

    X = A @ B.T
    angle = p[:, None] * ((t[0::2] + t[1::2]) * (2 * torch.pi))
    x, y = X[:, 0::2], X[:, 1::2]
    outputs = {}
    for name, cos, sin in (("O", angle.cos(), angle.sin()), ("R", cs[:, 0::2], cs[:, 1::2])):
        outputs[name] = torch.stack([x * cos + y * sin, y * cos - x * sin], dim=-1).flatten(1)
    return outputs


def inputs(generator, m, n):
    import torch

    from coda_agent.primitives.rotary import rotary_turns

    f = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64, device=generator.device) / 32)
    heads = n * 2 // 3 // 32
    p = torch.randint(131072, (m,), generator=generator, device=generator.device).float()
    angle = (p.double()[:, None] * f).repeat(1, n // 32 + 1)[:, : n // 2]
    cs = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1).to(torch.bfloat16)
    t = rotary_turns(f, n, head_dim=32, heads=heads)
    return {"p": p, "t": t, "cs": cs}
