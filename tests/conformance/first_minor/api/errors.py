"""Errors users see. Each names the field, the value and the way out; none needs a traceback to be understood."""

from __future__ import annotations


class DeepInferError(Exception):
    """Base of every error the engine raises on purpose. The CLI prints it as one line and exits with 2."""


class ConfigError(DeepInferError, ValueError):
    """A setting, environment variable or config.json field is unknown, of the wrong type or out of range."""


class CheckpointError(DeepInferError):
    """A checkpoint is missing something or damaged: names the file, the tensor, what was found and expected."""


class PluginError(DeepInferError):
    """A plugin that was asked for is missing, broken or incompatible; names distribution and cause."""


class PlanError(DeepInferError):
    """No provider meets a request, or a choice is ambiguous; lists every candidate's reason."""


class DeviceError(DeepInferError):
    """No device, or the device failed."""


class InvalidRequestError(DeepInferError, ValueError):
    """A prompt or a sampling parameter was refused before anything was queued."""
