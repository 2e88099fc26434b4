"""
The engine room: GPU versions of plain torch functions elsewhere. They must return the same numbers.

    backward.py      the learner's hand-written backward passes, in plain torch
    kernels.py       Triton kernels: the learner's and the decode step's
    decode.py        the sampler's decode steps and prefills as CUDA graphs
    hopper_fp4.py    the 4-bit matmul for Hopper
    register.py      `import fast.register` makes GPU tensors use them

Programs import register only once they have chosen a GPU, so everything else runs without Triton.
"""
