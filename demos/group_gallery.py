"""Statistics of groups of columns: scales of 1 x 128 blocks, a softmax over experts, rotated heads.

Q = A Bᵀ / s,   s[m, g] = max of |A Bᵀ| over 128 columns,   l[m, g] = its min over 16;
P = softmax of A Bᵀ over 32 columns;   R = normed heads of 64 columns, rotated;
G = silu(gate) up over its largest magnitude in 64

A (M, K), B (N, K) bfloat16, t (N,) float32, N a multiple of 128; Q, P, R (M, N), G (M, N/2)
bfloat16, s (M, N/128), l (M, N/16), v (M, N/32), w (M, N/64) float32.
"""

from coda_agent.primitives import (
    GroupTile16,
    GroupTile32,
    GroupTile64,
    GroupTile128,
    HalfTile,
    RowVector,
    Tile,
    absolute,
    epilogue,
    exp,
    group_max,
    group_mean,
    group_min,
    group_sum,
    interleave,
    pairs,
    rotate,
    rsqrt,
    swiglu,
)


@epilogue(Q=Tile, s=GroupTile128, l=GroupTile16)
def block_scales(acc):
    """Q = A Bᵀ / s; s = max |A Bᵀ| in each 128 columns; l = min |A Bᵀ| in each 16."""
    size = absolute(acc)
    scale = group_max(size, 128) + 1e-6
    return {"Q": acc / scale, "s": scale, "l": group_min(size, 16)}


@epilogue(P=Tile, v=GroupTile32)
def softmax_of_groups(acc):
    """P = softmax of A Bᵀ over each 32 columns; v = its largest value."""
    top = group_max(acc, 32)
    e = exp(acc - top)
    total = group_sum(e, 32)
    return {"P": e / total, "v": 1.0 / total}


@epilogue(R=Tile, w=GroupTile64)
def normed_and_rotated(acc, t: RowVector):
    """R = the pairs of each normed head of 64 columns, rotated; w = 1 / rms."""
    r = rsqrt(group_mean(acc * acc, 64) + 1e-6)
    x, y = pairs(acc * r)
    cosine, sine = pairs(t)
    u, v = rotate(x, y, cosine, sine)
    return {"R": interleave(u, v), "w": r}


@epilogue(G=HalfTile)
def scaled_gate(acc):
    """G = SwiGLU of A Bᵀ over its largest magnitude in each 64 results."""
    gate, up = pairs(acc)
    gated = swiglu(gate, up)
    return {"G": gated / (group_max(absolute(gated), 64) + 1e-6)}


# --- end of program ---

WHY = """
- `GroupTile128` stores one element for each group, here the scale for a later product of blocks.
- A stable softmax takes a maximum and then a sum. 64 half-width values are 128 columns.
"""

N_MULTIPLE = 128


def reference(A, B, t):
    import torch

    d = A @ B.T
    by = lambda x, width: x.unflatten(-1, (-1, width))
    scale = by(d.abs(), 128).amax(-1, keepdim=True) + 1e-6
    p = by(d, 32).softmax(-1)
    r = (by(d.square(), 64).mean(-1, keepdim=True) + 1e-6).rsqrt()
    n = (by(d, 64) * r).flatten(-2)
    x, y, cosine, sine = n[:, 0::2], n[:, 1::2], t[0::2], t[1::2]
    rotated = torch.stack((x * cosine + y * sine, y * cosine - x * sine), -1).flatten(-2)
    h = by(torch.nn.functional.silu(d[:, 0::2]) * d[:, 1::2], 64)
    return {
        "Q": (by(d, 128) / scale).flatten(-2),
        "s": scale[..., 0],
        "l": by(d.abs(), 16).amin(-1),
        "P": p.flatten(-2),
        "v": p.amax(-1),
        "R": rotated,
        "w": r[..., 0],
        "G": (h / (h.abs().amax(-1, keepdim=True) + 1e-6)).flatten(-2),
    }
