"""
Registers all GPU versions under the names that ops.on_gpu() looks up. Needs Triton.
"""
import marlin_fp4
from fast import backward, decode, kernels
from ops import ON_GPU

# Each replaces the function of the same name that is marked @replaced_on_gpu.
ON_GPU.update(backward.gpu_versions())
ON_GPU.update({function.__name__: function for function in (
    kernels.attend_spans, kernels.attend_spans_backward, kernels.merge, kernels.swiglu,
    kernels.swiglu_backward, kernels.softmax_at, kernels.elementwise)})
ON_GPU["pack"] = marlin_fp4.pack                 # nvfp4.fuse: puts codes in the kernels' order
ON_GPU["GraphEngine"] = decode.GraphEngine       # sampler.engine_for: decode steps as CUDA graphs
