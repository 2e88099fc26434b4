"""
GPU versions of plain torch functions elsewhere. They must return the same numbers.

`import fast` registers them under the names that ops.on_gpu() looks up. Programs import it only
once they have chosen a GPU, so everything else runs without Triton.
"""
import marlin_fp4
from fast import decode, kernels
from ops import ON_GPU

# Each replaces the function of the same name that is marked @twin_in_kernels.
TWINS = (
    kernels.attend_spans, kernels.attend_spans_backward, kernels.merge,                 # attention
    kernels.elementwise, kernels.swiglu, kernels.swiglu_backward, kernels.softmax_at)   # ops

ON_GPU.update({twin.__name__: twin for twin in TWINS})
ON_GPU["pack"] = marlin_fp4.pack                 # nvfp4.fuse: puts codes in the kernels' order
ON_GPU["GraphEngine"] = decode.GraphEngine       # sampler.engine_for: decode steps as CUDA graphs
