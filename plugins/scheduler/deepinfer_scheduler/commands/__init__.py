"""The ``deepinfer`` commands of this plugin."""
