from coda_agent.primitives import RowVector, Tile, absolute, epilogue, log, ptx


@epilogue(O=Tile)
def gemm_symlog(acc, bias: RowVector):
    """O = sign(z) · log(1 + |z|), z = A Bᵀ + bias."""
    z = acc + bias
    size = log(1.0 + absolute(z))
    return {"O": ptx("copysign", "copysign.f32 $0, $2, $1;", size, z)}
