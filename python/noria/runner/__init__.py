"""Runners: what turns a planned step into sampled token ids."""
