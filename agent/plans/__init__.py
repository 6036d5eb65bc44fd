"""Plans: a function of several products as kernels, and what is left to PyTorch.

- `trace`: the function as a graph of torch calls; `simpler`: those that are taken apart.
- `rules`: what is changed in it first; `cut`: which calls each kernel takes along.
- `spell`: a step as the text that a person would write; `kernels`: that text as a kernel.
- `run`: the steps as a callable; `fused`: the function that users call.
- `imports`: what makes a first call quicker.
- `passes`: a function's forward and backward pass, each by a plan.
"""
