"""Operands of samples, of positions and of heads, read by place; halves of heads exchanged.

X = A Bᵀ, whose rows are samples of S tokens each and whose columns are heads of 32 each:

gated[m, n]  = X[m, n] · gate[m / S, n] · scale[m / S, n / 32]
placed[m, n] = X[m, n] · up[m, n / 2] + position[m mod S, n] · slope[n / 32]
turned[m, n] = X[m, n] · c[m mod S, n mod 32] + half(X)[m, n] · s[m mod S, n mod 32]

half(X) has in each head the second 16 columns negated, then the first 16. A (M, K) and B (N, K)
bfloat16. Operands bfloat16: gate (M / S, N), scale (M / S, N / 32), up (M, N / 2),
position (S, N), slope (1, N / 32), c and s (S, 32). Outputs (M, N) bfloat16.
"""

from coda_agent.primitives import (
    PositionHeads,
    PositionPairs,
    PositionTable,
    SampleHeads,
    SampleTable,
    Tile,
    epilogue,
    rotate_half,
)


@epilogue(gated=Tile)
def gated_samples(acc, gate: SampleTable, scale: SampleHeads):
    """What each sample has, as in a modulated block."""
    return {"gated": acc * gate * scale}


@epilogue(placed=Tile)
def placed_tokens(acc, up: PositionPairs, position: PositionTable, slope: PositionHeads):
    """What each position has, what each head has, and what two adjacent columns share."""
    return {"placed": acc * up + position * slope}


@epilogue(turned=Tile)
def turned_halves(acc, c: PositionTable, s: PositionTable):
    """Columns j and j + 16 of a head turned against each other, as Hugging Face pairs them."""
    return {"turned": acc * c + rotate_half(acc, 32) * s}


# --- end of program ---

N_MULTIPLE = 32

WHY = """
- Each operand stays as small as it is: the kernel computes which element a place reads. Expanding
  one to (M, N) first would write and read what the product itself writes.
- They are read element by element, through the cache, at any strides. A `HeadTable` goes through
  TMA, which asks more of its dims.
- `rotate_half` costs a sign, since a thread holds both columns; the weight needs no packing.
"""


def reference(A, B, gate, scale, up, position, slope, c, s):
    import torch

    X = A @ B.T
    m, n = X.shape

    def samples(x):
        return x.repeat_interleave(m // x.shape[0], 0)

    def tokens(x):
        return x.repeat(m // x.shape[0], 1)

    def heads(x):
        return x.repeat_interleave(n // x.shape[1], 1)

    first, second = X.unflatten(1, (-1, 32)).chunk(2, dim=-1)
    half = torch.cat([-second, first], dim=-1).flatten(1)
    width = n // 32
    return {
        "gated": X * samples(gate) * heads(samples(scale)),
        "placed": X * up.repeat_interleave(2, 1) + tokens(position) * heads(tokens(slope)),
        "turned": X * tokens(c).repeat(1, width) + half * tokens(s).repeat(1, width),
    }


def inputs(generator, m, n):
    import torch

    tokens = next(x for x in (16, 11, 8, 7, 5, 4, 3, 2, 1) if m % x == 0)
    shapes = {
        "gate": (m // tokens, n),
        "scale": (m // tokens, n // 32),
        "up": (m, n // 2),
        "position": (tokens, n),
        "slope": (1, n // 32),
        "c": (tokens, 32),
        "s": (tokens, 32),
    }
    return {
        x: torch.randn(shape, generator=generator, device=generator.device).to(torch.bfloat16)
        for x, shape in shapes.items()
    }
