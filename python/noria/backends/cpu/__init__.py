"""The CPU backend: a model's forward, recorded once, and run a step at a time by noria-cpu on its own threads."""
