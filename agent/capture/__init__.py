"""From a model's configuration to the specs of its layers.

- `config`: what a Hugging Face configuration says of a layer.
- `pieces`: a layer as PyTorch functions, attention left out.
- `pullback`: what PyTorch moves for gradients.
- `running`: a layer with attention, run by plans.
- `steps`: their plans, the specs of kernels forward and backward, and what they move.
"""
