"""From a forward spec to the specs of its backward pass.

- `adjoint`: the chain rule, backwards over a program's graph.
- `steps`: which product brings a gradient, what is saved, and what each kernel then computes.
- `spelling`: a graph as the PyTorch reference of a spec.
- `checking`: what was derived, against autograd in float64.
"""
