"""Huawei Ascend 950 as a backend of DeepInfer: device and operators over torch_npu. Not run on hardware."""

__version__ = "0.1.0"
