"""Statistics of columns: the gradient of a norm's weight, and magnitudes of channels.

A norm Y = X ⊙ γ, with X the normalised rows, meets the gradient G = A Bᵀ of Y on the way back:

D = G ⊙ γ,   g[n] = Σₘ G[m, n] X[m, n]

and `channel_amax` keeps O = A Bᵀ with amax[n] = maxₘ |O[m, n]|, one number a channel.

A (M, K), B (N, K) and X (M, N) bfloat16, γ (N,) float32; D and O (M, N) bfloat16, g and amax (N,)
float32.
"""

from coda_agent.primitives import ColMax, ColSum, RowVector, Tile, absolute, epilogue


@epilogue(D=Tile, g=ColSum)
def norm_weight_gradient(acc, X: Tile, gamma: RowVector):
    """D = A Bᵀ ⊙ γ; g = sum of A Bᵀ ⊙ X over each column."""
    return {"D": acc * gamma, "g": acc * X}


@epilogue(O=Tile, amax=ColMax)
def channel_amax(acc):
    """O = A Bᵀ; amax = max |O| over each column."""
    return {"O": acc, "amax": absolute(acc)}


# --- end of program ---

INPUTS = {"gamma": {"mean": 1.0, "scale": 0.1}}

WHY = """
- A reduction over rows cuts M, not N: a partial for each row of tiles, (N, ⌈M / tile_m⌉) as raw
  values, and a small second launch folds them to (N,). There is no mean over rows: divide by M.
- Returning the product itself lets the sum fold it as fused multiply-adds. `acc * X` is 0 past the
  last row, where the accumulator and tiles read 0, so nothing has to be masked. With a scale for
  each row in it the product could be anything there: a masked sum, a comparison more an element.
- X is read once, for the gradient of its own norm; a kernel of its own for g would read both G and
  X again, 2·M·N elements.
- Partials are summed in fp32 and in a fixed order, with no atomics: two runs give the same bits.
- amax / 127 is the scale of a channel; a maximum is exact whatever the tile's height.
"""


def reference(A, B, X, gamma):
    G = A @ B.T
    return {"D": G * gamma, "g": (G * X).sum(0), "O": G, "amax": G.abs().amax(0)}
