"""How the draft modules of the demo model were made: prompts, the target's own text, modules, losses."""
