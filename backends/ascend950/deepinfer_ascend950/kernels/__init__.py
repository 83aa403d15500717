"""Triton kernels for what torch_npu lacks, written for vector and cube cores: compiled to Ascend 950 IR in the tests.

Pointer arithmetic is kept plain and unmasked: the adapter from Triton to the Ascend compiler refuses more. Sizes that
are fixed for a model are compile-time constants. Loads are widened before they are computed with.
"""
