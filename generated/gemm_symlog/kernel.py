from coda_agent.primitives import RowVector, Tile, absolute, epilogue, ptx


@epilogue(O=Tile)
def gemm_symlog(acc, bias: RowVector):
    """O = sign(z) · log(1 + |z|), z = A Bᵀ + bias, small z with all their digits."""
    z = acc + bias
    # Below 1/8 a polynomial, right to 2^-21: 1 + |z| has lost digits of |z|, and near 1 lg2.approx
    # is good to 2^-22, not to 2^-22 of its result.
    size = ptx(
        "log1p",
        ".reg .f32 u, t, size; .reg .pred small;"
        "add.f32 u, $1, 1.0; lg2.approx.ftz.f32 u, u; mul.f32 u, u, 0.6931471806;"
        "fma.rn.f32 t, $1, 0.20373982, -0.25326228; fma.rn.f32 t, $1, t, 0.3333102;"
        "fma.rn.f32 t, $1, t, -0.49998751; fma.rn.f32 t, $1, t, 1.0; mul.f32 t, $1, t;"
        "abs.f32 size, $1; setp.lt.f32 small, size, 0.125; selp.f32 $0, t, u, small;",
        absolute(z),
    )
    return {"O": ptx("copysign", "copysign.f32 $0, $2, $1;", size, z)}
