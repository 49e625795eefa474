"""The CPU backend: a model's forward, recorded once, and run by noria-cpu on its own threads."""
