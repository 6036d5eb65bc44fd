"""From a forward spec to the specs of its backward pass.

- `adjoint`: the chain rule, backwards over a program's graph.
- `factor`: gradients as one would write them.
- `scaling`: rows scaled before all else, where a program scales what it takes out of them.
- `kernel`, `steps`: which product brings a gradient, what is saved, and what is then computed.
- `backward`: the specs, and the PyTorch around their kernels.
- `spelling`: a graph as the PyTorch reference of a spec.
- `checking`: what was derived, against autograd in float64.
"""
