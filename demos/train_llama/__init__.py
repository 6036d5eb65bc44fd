"""Train a small Llama by the kernels, and the same by PyTorch beside it.

    python -m coda_agent.demos.train_llama --steps 300 --out DIR

- The text is that of the shipped specs, in bytes. A seed draws the first weights and the batches.
- Models of one seed take turns at each step, so that times compare.
- Weights are bfloat16; AdamW keeps float32 ones and rounds them after each step.
- DIR gets results.json. An interrupted run leaves state.pt, from which the same command goes on.
"""
