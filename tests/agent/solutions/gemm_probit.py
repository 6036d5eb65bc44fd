from coda_agent.primitives import RowVector, Tile, epilogue, ptx, tanh


@epilogue(O=Tile)
def gemm_probit(acc, bias: RowVector):
    p = 0.999 * tanh((acc + bias) * 0.5)
    quantile = ptx(
        "erfinv",
        ".reg .f32 n, u, w, t, q;"
        "neg.f32 n, $1;"
        "fma.rn.f32 u, n, $1, 1.0;"
        "lg2.approx.f32 w, u;"
        "fma.rn.f32 w, w, -0.6931472, 2.0;"
        "sqrt.approx.f32 t, w;"
        "fma.rn.f32 q, t, 0.020584662, -0.27956551;"
        "fma.rn.f32 q, q, t, 1.3812216;"
        "fma.rn.f32 q, q, t, -1.830527;"
        "fma.rn.f32 q, q, t, 1.4216858;"
        "mul.f32 $0, q, $1;",
        p,
    )
    return {"O": 1.4142135623730951 * quantile}
