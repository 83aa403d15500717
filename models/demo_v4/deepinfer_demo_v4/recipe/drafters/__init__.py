"""How draft modules for this model are made: prompts, the model's own text, modules, losses."""
