"""Adapters from the core's operator contracts to torch_npu's fused operators, one file each.

Each docstring names the operator, the semantics relied on and their source: the documents inside the torch_npu wheel
(``torch_npu/_op_plugin_docs.py``) or its schema. They call ``torch.ops.npu`` when they run, so that importing them
needs no torch_npu.
"""
