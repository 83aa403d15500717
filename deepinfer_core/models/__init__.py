"""Built-in model families, written only against the operator contracts."""
